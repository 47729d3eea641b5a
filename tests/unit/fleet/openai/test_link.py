"""Servers of the OpenAI API as members of a fleet, over real sockets: the same gateway, and no branch in it."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from quire.client.reply.outputs import Completion
from quire.client.request.params import Grammar, SamplingParams
from quire.errors import ConfigError, EngineDeadError, QueueFullError, QuireError, RequestError
from quire.fleet.gateway.client import FleetModel
from quire.fleet.gateway.discovery import FixedMembers
from quire.fleet.openai.tokenizer_source import OpenAIMemberRules, tokenizer_source_of
from quire.fleet.routing.block_names import names_of, root_name
from quire.fleet.routing.membership import MemberState
from tests.support.errors import raises_code
from tests.support.fleet.small_fleets import oracle_words, small_member
from tests.support.machine.patience import PATIENCE_S
from tests.support.servers.local_api import house
from tests.support.servers.openai_server import OpenAIServer, answer, openai_server

GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
LONG_S = 10 * PATIENCE_S
DICE = SamplingParams(max_tokens=24, temperature=0.9, seed=7, ignore_eos=True, presence_penalty=0.5, top_k=9)


def rules() -> OpenAIMemberRules:
    text = oracle_words()
    return OpenAIMemberRules(tokenizer_source_of(text, None, 512))


@asynccontextmanager
async def fleet_of(*lines: str, num_ready: int | None = None, **settings: Any) -> AsyncIterator[FleetModel]:
    settings = {"openai_rules": rules(), **settings}
    async with FleetModel("oracle", FixedMembers(lines), None, **settings) as model:
        await until(lambda: model.fleet.num_ready == (len(lines) if num_ready is None else num_ready))
        yield model


async def until(condition: Callable[[], bool]) -> None:
    """It must come true."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.005)


def tokens(done: Completion) -> list[tuple[int, ...]]:
    return [one.token_ids for one in done.answers]


@pytest.mark.parametrize("params", [GREEDY, DICE], ids=["greedy", "dice"])
def test_a_stranger_answers_what_a_member_of_quire_does(params: SamplingParams) -> None:
    async def run() -> None:
        async with small_member() as member, fleet_of(member.address) as model:
            expected = await model.generate("once upon a time", params)
        for at_once in (1, 5):
            async with openai_server(tokens_at_once=at_once) as server, fleet_of(server.line) as model:
                done = await model.generate("once upon a time", params)
                assert tokens(done) == tokens(expected)
                assert (done.answers[0].text, done.answers[0].finish_reason) == (expected.answers[0].text, "length")
                assert done.num_inexact_moves == model.fleet.num_open == 0

    asyncio.run(run())


def test_several_answers_have_connections_and_seeds_of_their_own() -> None:
    async def run() -> None:
        async with openai_server() as server, fleet_of(server.line) as model:
            done = await model.generate("two", replace(DICE, n=2, logprobs=2))
            bodies = sorted(server.bodies, key=lambda body: int(body["seed"]))
            assert [body["seed"] for body in bodies] == [7, 8]
            assert tokens(done) == [tuple(answer(body, server.vocabulary_size)) for body in bodies]
            assert [one.logprob for one in done.answers[1].logprobs] == [-1.0] * 24
            assert done.answers[0].logprobs[0].alternatives

    asyncio.run(run())


def test_a_server_of_quire_that_knows_of_no_fleet_can_be_one() -> None:
    async def run(line: str) -> None:
        async with openai_server() as server, fleet_of(server.line) as model:
            expected = [await model.generate("once upon a time", params) for params in (GREEDY, DICE)]
        async with fleet_of(line) as model:
            done = [await model.generate("once upon a time", params) for params in (GREEDY, DICE)]
        assert list(map(tokens, done)) == list(map(tokens, expected))
        assert done[1].num_cached_tokens > 0

    with house() as quire:
        asyncio.run(run(f"openai:{quire.url}"))


def test_cached_tokens_are_counted_and_cache_groups_are_salts() -> None:
    async def run() -> None:
        async with openai_server() as server, fleet_of(server.line) as model:
            prompt = "a prompt that is asked twice"
            num_tokens = len((await model.generate(prompt, GREEDY, tenant="a")).prompt_token_ids)
            again = await model.generate(prompt, GREEDY, tenant="a")
            assert again.num_cached_tokens == (num_tokens - 1) // 4 * 4
            assert (await model.generate(prompt, GREEDY, tenant="b")).num_cached_tokens == 0
            assert [body["cache_salt"] for body in server.bodies] == ["a", "a", "b"]

    asyncio.run(run())


def test_whoever_leaves_closes_the_connection_and_the_server_sees_it() -> None:
    async def run() -> None:
        async with openai_server(is_paced=True) as server, fleet_of(server.line) as model:
            server.go(3)
            async for _ in model.stream("leave me", GREEDY):
                break
            await until(lambda: server.num_left == 1 and server.num_streaming == 0)
            await until(lambda: model.fleet.num_open == 0)
            server.go(1000)
            assert tokens(await model.generate("and go on", GREEDY))

    asyncio.run(run())


def test_a_stop_text_ends_one_answer_and_not_the_other() -> None:
    async def run() -> None:
        async with openai_server() as server, fleet_of(server.line) as model:
            params = replace(DICE, n=2, max_tokens=60)
            whole = await model.generate("stop here", params)
            stop = whole.answers[0].text[8:10]
            server.is_paced = True
            asking = asyncio.create_task(model.generate("stop here", replace(params, stop=[stop])))
            server.go(1000)
            done = await asking
            assert done.answers[0].finish_reason == "stop"
            assert done.answers[0].text == whole.answers[0].text.partition(stop)[0]
            assert done.answers[1].text == whole.answers[1].text.partition(stop)[0]
            await until(lambda: server.num_streaming == 0)

    asyncio.run(run())


def test_when_the_server_dies_its_stream_goes_on_with_quire_and_the_answer_says_so() -> None:
    async def run() -> None:
        async with (
            openai_server(is_paced=True) as server,
            small_member(step_s=0.005) as member,
            fleet_of(server.line, member.address) as model,
        ):
            asking = [asyncio.create_task(model.generate(f"{at} is how it begins", GREEDY)) for at in range(6)]
            await until(lambda: server.num_streaming > 0)
            num_there = server.num_streaming
            server.go(4)  # however they are shared, no answer comes to its end
            await until(
                lambda: any(one.has_begun for one in model.fleet.in_flight.values() if one.member == server.line)
            )
            await server.kill()
            done = await asyncio.gather(*asking)
            assert all(len(one.answers[0].token_ids) == 24 for one in done)
            assert model.fleet.counts.num_moved >= num_there
            assert sum(one.num_inexact_moves for one in done) == model.fleet.counts.num_moved_inexact > 0
            for body in server.bodies:
                begun = [one for one in done if list(one.prompt_token_ids) == body["prompt"]]
                # Oracles all: quire goes on exactly, whoever has begun.
                assert begun[0].answers[0].token_ids == tuple(answer(body, server.vocabulary_size))

    asyncio.run(run())


def test_a_server_that_shuts_down_in_order_ends_its_streams_and_gets_nothing_new(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def run() -> None:
        async with openai_server(is_paced=True) as server, fleet_of(server.line) as model:
            asking = asyncio.create_task(model.generate("to its end", GREEDY))
            await until(lambda: server.num_streaming == 1)
            server.go(3)
            server.stop_listening()
            await until(lambda: model.fleet.num_ready == 0)
            async with small_member() as member:
                model.source = FixedMembers([server.line, member.address])
                assert len(tokens(await model.generate("to another", GREEDY))[0]) == 24
                server.go(1000)
                done = await asking
                assert (len(done.answers[0].token_ids), done.num_replays, len(server.bodies)) == (24, 0, 1)
                await until(lambda: model.fleet.router.membership.state_of(server.line) is MemberState.GONE)

    with caplog.at_level(logging.INFO):
        asyncio.run(run())
    assert "is shutting down" in caplog.text
    assert not [one for one in caplog.messages if one.startswith("member openai:") and "is gone" in one]


def test_a_stream_that_a_server_ends_because_it_shuts_down_goes_on_elsewhere_without_a_strike() -> None:
    def aborted(told: dict[str, Any]) -> bytes:
        for choice in told["choices"]:
            choice.update(finish_reason="abort", token_ids=[])
        return msgspec.json.encode(told)

    async def run() -> None:
        async with openai_server(is_paced=True) as server, fleet_of(server.line) as model:
            asking = asyncio.create_task(model.generate("and elsewhere", replace(GREEDY, max_tokens=400)))
            await until(lambda: server.num_streaming == 1)
            server.go(3)
            await until(lambda: any(one.has_begun for one in model.fleet.in_flight.values()))
            (flight,) = model.fleet.in_flight.values()
            server.stop_listening()
            server.says = aborted
            server.go(1)
            await until(lambda: flight.member is None)
            assert (flight.entry.num_strikes, model.fleet.num_held) == (0, 1)
            async with small_member() as member:
                model.source = FixedMembers([server.line, member.address])
                assert len((await asking).answers[0].token_ids) == 400

    asyncio.run(run())


def test_what_quire_began_a_stranger_ends_from_prompt_and_tokens() -> None:
    async def run() -> None:
        async with (
            openai_server() as server,
            small_member(step_s=0.02) as member,
            fleet_of(member.address) as model,
        ):
            # The other one is there before it begins, and takes nobody in: nothing is waited for while it goes on.
            model.source = FixedMembers([member.address, server.line])
            await until(lambda: model.fleet.num_ready == 2)
            server.refusal = (503, {"error": {"message": "busy"}}, {})
            params = replace(DICE, max_tokens=400)
            asking = asyncio.create_task(model.generate("from here to there", params))
            await until(lambda: any(one.has_begun for one in model.fleet.in_flight.values()))
            server.refusal = None
            await member.kill()
            done = await asking
            body = server.bodies[-1]
            num_before = len(body["prompt"]) - len(done.prompt_token_ids)
            assert tuple(body["prompt"]) == done.prompt_token_ids + done.answers[0].token_ids[:num_before]
            assert num_before >= 1
            assert (body["max_tokens"], body["seed"]) == (400 - num_before, 7)
            assert len(done.answers[0].token_ids) == 400
            assert (done.num_inexact_moves, done.num_replays) == (1, 1)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("status", "kind"), [(400, RequestError), (422, RequestError), (503, QueueFullError), (429, QueueFullError)]
)
def test_a_refusal_is_told_as_what_it_is(status: int, kind: type[QuireError]) -> None:
    async def run() -> None:
        async with openai_server() as server, fleet_of(server.line) as model:
            server.refusal = (status, {"error": {"message": "not like this"}}, {"Retry-After": "9"})
            with pytest.raises(kind) as told:
                await model.generate("refuse me", GREEDY)
            assert "not like this" in str(told.value) or getattr(told.value, "retry_after_s", 0) == 9
            assert model.fleet.num_open == 0
            server.refusal = None
            assert tokens(await model.generate("and me not", GREEDY))

    asyncio.run(run())


def test_a_server_without_room_has_others_asked() -> None:
    async def run() -> None:
        async with openai_server() as full, openai_server() as free, fleet_of(full.line, free.line) as model:
            full.refusal = (503, {"error": {"message": "busy"}}, {})
            done = await asyncio.gather(*(model.generate(f"{at} is how it begins", GREEDY) for at in range(4)))
            assert all(len(one.answers[0].token_ids) == 24 for one in done)
            assert len(full.bodies) > 0
            assert len(free.bodies) == 4

    asyncio.run(run())


def test_what_only_quire_can_do_goes_to_quire_and_is_refused_without_it() -> None:
    only_quire = [
        SamplingParams(max_tokens=30, temperature=1.0, seed=8, grammar=Grammar.regex("[a-f]{10,20}")),
        SamplingParams(max_tokens=4, prompt_logprobs=1, ignore_eos=True),
        SamplingParams(max_tokens=4, banned_token_ids=[3], ignore_eos=True),
    ]

    async def run() -> None:
        async with openai_server() as server:
            async with small_member() as member, fleet_of(server.line, member.address, suspect_after_s=60.0) as model:
                for params in only_quire:
                    assert tokens(await model.generate("only you", params))
                assert (await model.explain("only you")).num_cached_tokens >= 0
                assert server.bodies == []
            async with fleet_of(server.line) as model:
                for params in only_quire:
                    with pytest.raises(RequestError, match="no ready member can serve this request"):
                        await model.generate("nobody", params)
                with raises_code(EngineDeadError, "engine_dead"):
                    await model.explain("nobody")

    asyncio.run(run())


def test_what_only_quire_can_do_waits_when_the_last_member_of_quires_own_is_gone() -> None:
    async def run() -> None:
        async with (
            openai_server() as server,
            small_member() as member,
            fleet_of(server.line, member.address) as model,
        ):
            await member.kill()
            await until(lambda: model.fleet.num_ready == 1)
            params = SamplingParams(max_tokens=4, prompt_logprobs=1, ignore_eos=True)
            asking = asyncio.create_task(model.generate("only you", params))
            await until(lambda: model.fleet.num_held == 1)
            assert tokens(await model.generate("anyone", GREEDY))
            async with small_member(address=member.address):
                assert len(tokens(await asking)[0]) == 4

    asyncio.run(run())


def strange_token(told: dict[str, Any]) -> bytes:
    for choice in told["choices"]:
        choice["token_ids"] = [1 << 20]
    return msgspec.json.encode(told)


@pytest.mark.parametrize(
    ("says", "words"), [(lambda _told: b"{not json", "a completion chunk"), (strange_token, "expected token ids")]
)
def test_a_server_that_says_what_cannot_be_is_left_and_its_requests_move(
    says: Callable[[dict[str, Any]], bytes], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        async with (
            openai_server(says=says) as liar,
            openai_server() as honest,
            fleet_of(liar.line, honest.line) as model,
        ):
            done = await asyncio.gather(*(model.generate(f"{at} is how it begins", GREEDY) for at in range(4)))
            assert all(len(one.answers[0].token_ids) == 24 for one in done)
            assert len(liar.bodies) > 0

    with caplog.at_level(logging.WARNING):
        asyncio.run(run())
    assert words in caplog.text


@pytest.mark.parametrize("code", [400, 500])
def test_an_error_in_the_middle_of_a_stream_of_a_server_that_is_well_ends_that_request_alone(code: int) -> None:
    def breaks(told: dict[str, Any]) -> bytes:
        if any(choice["finish_reason"] for choice in told["choices"]):
            return msgspec.json.encode({"error": {"message": "out of ideas", "code": code}})
        return msgspec.json.encode(told)

    async def run() -> None:
        async with openai_server(says=breaks) as server, fleet_of(server.line) as model:
            done = await model.generate("to its end", GREEDY)
            assert done.answers[0].finish_reason == "error"
            assert "out of ideas" in (done.answers[0].error or "")
            server.says = None
            assert (await model.generate("to its end", GREEDY)).answers[0].finish_reason == "length"
            assert model.fleet.counts.num_moved == 0

    asyncio.run(run())


def test_a_request_ends_at_its_deadline_though_the_server_knows_of_none(monkeypatch: pytest.MonkeyPatch) -> None:
    deadlines, ordinary = list[tuple[float, asyncio.Timeout]](), asyncio.timeout

    def timeout(after_s: float | None) -> asyncio.Timeout:
        if after_s is None or after_s <= PATIENCE_S:
            return ordinary(after_s)
        deadlines.append((after_s, ordinary(None)))  # it ends when the test says so
        return deadlines[-1][1]

    async def run() -> None:
        async with openai_server(is_paced=True) as server, fleet_of(server.line) as model:
            server.go(2)
            monkeypatch.setattr(asyncio, "timeout", timeout)
            asking = asyncio.create_task(model.generate("too slow", GREEDY, timeout_s=LONG_S))
            await until(lambda: any(len(one.entry.tokens[0]) == 2 for one in model.fleet.in_flight.values()))
            (after_s, deadline), *_ = deadlines
            assert PATIENCE_S < after_s <= LONG_S
            deadline.reschedule(asyncio.get_running_loop().time())
            done = await asking
            assert (done.answers[0].finish_reason, len(done.answers[0].token_ids)) == ("deadline", 2)
            await until(lambda: server.num_streaming == 0)

    asyncio.run(run())


def test_a_server_that_comes_back_is_a_member_again() -> None:
    async def run() -> None:
        async with openai_server() as server, fleet_of(server.line) as model:
            await server.kill()
            await until(lambda: model.fleet.num_ready == 0)
            asking = asyncio.create_task(model.generate("wait for it", GREEDY))
            async with openai_server(port=server.port):
                assert len(tokens(await asking)[0]) == 24

    asyncio.run(run())


def test_load_and_size_are_read_from_metrics_and_without_any_the_gateway_counts_alone() -> None:
    async def run() -> None:
        async with (
            openai_server(num_waiting=3) as server,
            openai_server(has_metrics=False) as silent,
            fleet_of(server.line, silent.line) as model,
        ):
            assert model.fleet.members[server.line].card.info.num_blocks == 100
            assert model.fleet.members[silent.line].card.info.block_size == 16
            await until(lambda: model.fleet.members[server.line].load.num_waiting == 3)
            assert model.fleet.members[server.line].load.num_used_blocks == 25
            done = await asyncio.gather(*(model.generate(f"{at} is how it begins", GREEDY) for at in range(4)))
            assert all(len(one.answers[0].token_ids) == 24 for one in done)

    asyncio.run(run())


def test_one_with_another_tokenizer_or_without_its_key_is_never_let_in(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("sk-right")

    async def problem_of(server: OpenAIServer, words: str, *options: str) -> None:
        line = " ".join((server.line, *options))
        model = FleetModel("oracle", FixedMembers([line]), None, openai_rules=rules())
        entering = asyncio.create_task(model.__aenter__())
        await until(lambda: line in model.links and words in model.links[line].problem)
        entering.cancel()
        await asyncio.gather(entering, return_exceptions=True)

    async def run() -> None:
        async with openai_server() as server:
            await problem_of(server, "to have model 'other'", "model=other")
            server.encode = lambda text: [*text.encode()][::-1]
            await problem_of(server, "the gateway's tokenizer")
        async with openai_server(key="sk-right") as server:
            await problem_of(server, "401")
            async with fleet_of(f"{server.line} key-file={tmp_path / 'key'}") as model:
                assert tokens(await model.generate("let me in", GREEDY))

    asyncio.run(run())


def test_a_fleet_of_strangers_alone_needs_words_and_a_quire_member_brings_them() -> None:
    async def run() -> None:
        async with openai_server() as server:
            with raises_code(ConfigError, "tokenizer_missing"):
                async with FleetModel("oracle", FixedMembers([server.line]), None):
                    pass
            async with small_member() as member:
                lines = [server.line, member.address]
                async with fleet_of(*lines, openai_rules=OpenAIMemberRules()) as model:
                    done = await asyncio.gather(*(model.generate(f"{at} is how it begins", GREEDY) for at in range(4)))
                    assert all(len(one.answers[0].token_ids) == 24 for one in done)
                    assert server.bodies

    asyncio.run(run())


def test_quire_may_join_a_fleet_that_began_with_strangers_alone() -> None:
    async def run() -> None:
        async with openai_server() as server, fleet_of(server.line) as model, small_member() as member:
            model.source = FixedMembers([server.line, member.address])
            await until(lambda: model.fleet.num_ready == 2)
            done = await asyncio.gather(*(model.generate(f"{at} is how it begins", GREEDY) for at in range(6)))
            assert all(len(one.answers[0].token_ids) == 24 for one in done)
            assert member.supervisor.ledger.num_progress > 0
            assert (await model.explain("number 1")).num_cached_tokens >= 0

    asyncio.run(run())


def test_beyond_this_machine_a_clear_link_needs_the_flag() -> None:
    async def run() -> None:
        with raises_code(ConfigError, "unencrypted_member"):
            async with fleet_of("openai:http://192.0.2.1:8000"):
                pass

    asyncio.run(run())


def test_what_a_stranger_publishes_fills_the_index() -> None:
    async def run() -> None:
        with zmq.asyncio.Context() as context, context.socket(zmq.PUB) as news:
            news.setsockopt(zmq.LINGER, 0)
            port = news.bind_to_random_port("tcp://127.0.0.1")
            async with openai_server() as server:
                line = f"{server.line} events=tcp://127.0.0.1:{port}"
                async with fleet_of(line) as model:
                    ids = tuple(range(8))
                    event = {
                        "type": "BlockStored",
                        "block_hashes": [b"one", b"two"],
                        "parent_block_hash": None,
                        "token_ids": ids,
                        "block_size": 4,
                        "medium": "GPU",
                        "extra_keys": [("group",), None],
                    }
                    fingerprint = model.text.info.identity.fingerprint
                    names = names_of(root_name(fingerprint, "", "group"), ids, 4)
                    index, number = model.fleet.router.index, 0
                    while line not in index.depths(names):
                        batch = msgspec.msgpack.encode([float(number), [event]])
                        await news.send_multipart([b"", number.to_bytes(8, "big"), batch])
                        number += 1
                        await asyncio.sleep(0.02)

    asyncio.run(run())
