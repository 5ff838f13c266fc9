"""What a chat's messages may hold: texts. Parts that vLLM would fetch or decode are not carried.

A worker's renderer is vLLM's, which opens the addresses it finds in parts before it asks whether the model can see:
whoever may chat could have the worker read what only its network reaches, and hold up every other prompt meanwhile.
Only the prompt's tokens go to the engine, so that a picture would be lost besides.
"""

from __future__ import annotations

from typing import Any, NamedTuple

TEXT_PARTS = frozenset({"text", "input_text", "output_text", "refusal", "thinking"})
"""Types of parts that vLLM reads as text."""

MEDIA_KEYS = (
    "image_url", "input_image", "image_pil", "image_embeds", "audio_url", "input_audio", "audio_embeds",
    "video_url", "video_embeds", "prompt_embeds", "uuid",
)  # fmt: skip
"""Keys by which vLLM takes a part for something else than text, whatever its type says."""

SAID_OTHERWISE = ("assistant", "function")
"""Roles whose messages may have null for their content, as in vLLM: in place of a user's text it is a mistake."""


class WrongPart(NamedTuple):
    """The first part of a chat that is not text: `malformed`, or else well formed and not supported."""

    place: str
    text: str
    malformed: bool


def wrong_part(messages: list[dict[str, Any]]) -> WrongPart | None:
    """Return what in the contents of `messages` is not text; None if all is."""
    for position, message in enumerate(messages):
        place = f"messages.{position}.content"
        content = message.get("content")
        if isinstance(content, str) or "content" not in message:
            continue
        if content is None and message.get("role") in SAID_OTHERWISE:
            continue
        if not isinstance(content, list):
            return WrongPart(place, "must be a text or a list of parts", True)
        for number, part in enumerate(content):
            if (wrong := _wrong(part, f"{place}.{number}")) is not None:
                return wrong
    return None


def _wrong(part: Any, place: str) -> WrongPart | None:
    if isinstance(part, str):
        return None
    if not isinstance(part, dict):
        return WrongPart(place, "must be an object with a type", True)
    media = next((key for key in MEDIA_KEYS if part.get(key) is not None), None)
    kind = part.get("type")
    if media is None and kind is None:
        return WrongPart(f"{place}.type", "is missing", True)
    if media is None and isinstance(kind, str) and kind in TEXT_PARTS:
        return None
    named = kind if isinstance(kind, str) and kind not in TEXT_PARTS else media
    return WrongPart(f"{place}.type", f"{str(named)[:80]!r} is not supported; parts are text", False)
