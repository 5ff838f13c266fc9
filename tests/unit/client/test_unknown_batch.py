"""A watch of a batch of which nothing is known says so, rather than end as if all had come."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import penstock
from tests.support.fake_queue import FakeQueue, serving

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "streaming_results.py"


@pytest.fixture
async def client() -> AsyncIterator[penstock.Client]:
    async with serving(FakeQueue()) as address, penstock.Client(address, retry_for_s=5) as client:
        yield client


async def test_a_misspelt_batch_is_not_found(client: penstock.Client) -> None:
    await client.generate(prompt="a", batch="sums")
    with pytest.raises(penstock.NotFound, match=r"^nothing is known of the batch 'smus'$"):
        await anext(client.watch("smus"))


async def test_nothing_more_of_a_batch_is_no_error(client: penstock.Client) -> None:
    first = await client.generate(prompt="a", batch="sums")
    (result,) = [result async for result in client.watch("sums")]
    assert result.request_id == first.request_id
    assert [result async for result in client.watch("sums", cursor=result.cursor)] == []


async def test_the_example_reads_every_result_while_it_submits(capsys: pytest.CaptureFixture[str]) -> None:
    async with serving(FakeQueue()) as address:
        text = EXAMPLE.read_text().replace("127.0.0.1:7410", address).replace("asyncio.run(main())", "")
        program: dict[str, object] = {"__name__": "example"}
        exec(compile(text, str(EXAMPLE), "exec", dont_inherit=True), program)
        await program["main"]()  # type: ignore[operator]
    assert capsys.readouterr().out.count("\n") == 200
