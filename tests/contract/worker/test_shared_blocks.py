"""What several runs hold together, by the prefix cache, of every engine."""

from __future__ import annotations

import asyncio

import pytest

from services.worker.engine import PromptSpec
from tests.contract.worker.conftest import UnderTest
from tests.contract.worker.test_engine_contract import collect, generation, names, until_all_free

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(120)]


async def test_what_runs_hold_together_is_counted_once_for_each_but_the_first(made: UnderTest) -> None:
    await until_all_free(made)
    text = f"{next(names)} feeds the wheel and the wheel turns " * 10
    whole = len(made.renderer.render(PromptSpec(text=text)).token_ids) // 32
    assert whole > 1
    start = len(made.reports)
    alone, _ = await collect(generation(made, text, max_tokens=40))
    assert alone.tokens == 40
    assert all(report.blocks_shared == 0 for report in made.reports[start:])
    start = len(made.reports)
    await asyncio.gather(*[collect(generation(made, text, max_tokens=40)) for _ in range(3)])
    reports = made.reports[start:]
    # Of three that run at once two hold the prompt's full blocks besides, and nobody shares what is generated.
    assert max(report.blocks_shared for report in reports) == 2 * whole
    for report in reports:
        assert report.blocks_shared <= max(report.running - 1, 0) * whole
    assert reports[-1].blocks_shared == 0
    await until_all_free(made)


async def test_runs_that_have_nothing_in_common_share_nothing(made: UnderTest) -> None:
    await until_all_free(made)
    text = f"{next(names)} is found in the cache " * 10
    await collect(generation(made, text, max_tokens=2))
    start = len(made.reports)
    texts = [text, *(f"{next(names)} turns the wheel " * 8 for _ in range(4))]
    await asyncio.gather(*[collect(generation(made, one, max_tokens=60)) for one in texts])
    assert all(report.blocks_shared == 0 for report in made.reports[start:])
    await until_all_free(made)
