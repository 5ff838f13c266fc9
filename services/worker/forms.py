"""What gives an output its form, on its way to the tokenizer's process: structured outputs, and functions to be called.

With the prompt goes all else that says how it is run, for the engine's words on a form follow from that. What the
prompt has already is left out, and put back there: messages and tools may be long.
"""

from __future__ import annotations

from penstock.request.v1 import request_pb2 as pb
from services.worker.engine import PromptSpec


def form_of(sampling: pb.SamplingParams, chat: pb.ChatPrompt | None = None) -> bytes:
    """Return what `PromptSpec.form` of a chat, or of a completion, is to be: empty if its output may be anything."""
    offers = chat is not None and chat.HasField("tools")
    if not offers and not sampling.HasField("structured_outputs"):
        return b""
    form = pb.Request(sampling=sampling)
    if chat is not None:
        if offers:
            tools = chat.tools
            form.chat.tools.CopyFrom(pb.ToolUse(single_call=tools.single_call, in_parts=tools.in_parts))
        if chat.HasField("as_message"):
            form.chat.as_message.CopyFrom(chat.as_message)
    return form.SerializeToString()


def request_of(spec: PromptSpec) -> pb.Request:
    """Return the request of a prompt that has a form, without what names it; the text of a completion is left out."""
    request = pb.Request.FromString(spec.form)
    request.echo = spec.want_text
    if spec.messages_json is not None:
        chat = request.chat
        chat.messages_json = spec.messages_json
        chat.chat_template_kwargs_json = spec.chat_template_kwargs_json
        chat.add_generation_prompt = spec.add_generation_prompt
        chat.continue_final_message = spec.continue_final_message
        if chat.HasField("tools"):
            chat.tools.tools_json, chat.tools.tool_choice_json = spec.tools_json, spec.tool_choice_json
    return request
