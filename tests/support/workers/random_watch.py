"""What a server's watch stream might say: agents of three tenants on one pool, by seeded dice, without any server.

    python -m tests.support.workers.random_watch --port 8123 --key secret

serves the dashboard over it, for whoever works on the page; tests take `RandomWatch` alone.
"""

import argparse
import base64
import json
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from random import Random
from threading import Lock
from typing import Any
from urllib.parse import parse_qs, urlsplit

from quire.api.web_page import CSP, DASHBOARD, MEDIA_TYPES

BLOCK_SIZE = 16
STEP_S = 0.05
FREE, CACHED, USED, SHARED, PINNED, COMPUTING = range(6)
STATES = ("free", "cached", "used", "shared", "pinned", "computing")
CLASSES = ("HIGH", "NORMAL", "LOW")
MISSES = ("first_seen", "diverged", "evicted", "too_short", "computing", "other_namespace")


@dataclass
class Block:
    """One that is named or held."""

    number: int
    parent: "Block | None"
    tenant: str
    born_s: float
    children: list["Block"] = field(default_factory=list)
    holders: set[str] = field(default_factory=set)
    pins: int = 0
    is_computing: bool = False
    used_s: float = 0.0

    @property
    def state(self) -> int:
        if self.is_computing:
            return COMPUTING
        if self.pins:
            return PINNED
        return min(len(self.holders) + CACHED, SHARED)

    def chain(self) -> list["Block"]:
        found, parent = [self], self.parent
        while parent is not None:
            found.append(parent)
            parent = parent.parent
        return found[::-1]


@dataclass
class Asked:
    """A request of the model."""

    name: str
    tenant: str
    priority: str
    left_blocks: int
    left_tokens: int
    tail: Block | None
    segments: list[list[Any]]
    cached: int = 0
    computed: int = 0
    prompt: int = 0
    output: int = 0
    state: str = "waiting"


class RandomWatch:
    """A server that is not there, and what it would tell."""

    def __init__(self, seed: int = 7, num_blocks: int = 20_000, num_running: int = 64) -> None:
        self.random, self.num_blocks, self.num_running = Random(seed), num_blocks, num_running
        self.now_s, self.step = 50_000.0, 0
        self.blocks: dict[int, Block] = {}
        self.unused = list(range(num_blocks, 0, -1))
        self.roots: list[Block] = []
        self.tails: dict[str, list[Block]] = {}
        self.waiting: deque[Asked] = deque()
        self.running: list[Asked] = []
        self.recent: deque[Asked] = deque(maxlen=200)
        self.totals = dict.fromkeys(
            ("num_prompt_tokens", "num_cached_tokens", "num_output_tokens", "num_requests", "num_preemptions"), 0
        )
        self.steps: deque[dict[str, Any]] = deque(maxlen=200)
        self.wave = 0.0
        self.history = [self._row(self.now_s - 3600 + 10 * at) for at in range(360)]
        self.misses = {reason: [0, 0] for reason in MISSES}
        self._numbers = count(1)
        self.lock = Lock()
        self.num_members = 0
        """Of a fleet, whose gateway knows no blocks."""

    # -- the model -----------------------------------------------------------------------------------------------------

    def run(self, seconds: float) -> None:
        """So much later."""
        for _ in range(int(seconds / STEP_S)):
            self._arrive()
            self._step()

    def _arrive(self) -> None:
        while len(self.waiting) + len(self.running) < self.num_running + self.random.randrange(0, 24):
            tenant = self.random.choices(("research", "support", "nightly"), (5, 3, 2))[0]
            known = self.tails.setdefault(tenant, [])
            chance = self.random.random()
            tail = self.random.choice(known[-40:]) if known and chance < 0.5 else self._prompt_of(tenant, chance)
            priority = {"support": "HIGH", "nightly": "LOW"}.get(tenant, "NORMAL")
            name = f"req_{next(self._numbers):08x}"
            blocks = self.random.randint(8, 60) if tail else self.random.randint(60, 200)
            asked = Asked(
                name, tenant, priority, blocks, self.random.randint(60, 900), tail, [["waiting", self.now_s, None]]
            )
            self.waiting.append(asked)
            self.recent.append(asked)

    def _prompt_of(self, tenant: str, chance: float) -> Block | None:
        """What the agents of a tenant begin with, if any of them have been here: all of it, or a part."""
        own = [one for one in self.roots if one.tenant == tenant]
        if not own or chance >= 0.95:
            return None
        at: Block = max(own, key=lambda one: len(one.holders))
        for _ in range(self.random.choice((50, 50, 90, 140))):
            at = max(at.children or [at], key=lambda one: len(one.holders))
        return at

    def _turn(self, asked: Asked, kind: str | None, state: str) -> None:
        if asked.segments:
            asked.segments[-1][2] = self.now_s
        if kind is not None:
            asked.segments.append([kind, self.now_s, None])
        asked.state = state

    def _start(self) -> None:
        while self.waiting and len(self.running) < self.num_running:
            asked = self.waiting.popleft()
            chain = asked.tail.chain() if asked.tail else []
            for block in chain:
                block.holders.add(asked.name)
            asked.cached = asked.computed = BLOCK_SIZE * len(chain)
            asked.prompt = max(asked.prompt, asked.cached + BLOCK_SIZE * asked.left_blocks)
            self.totals["num_requests"] += 1
            self.totals["num_prompt_tokens"] += asked.prompt
            self.totals["num_cached_tokens"] += asked.cached
            reason = self.random.choices(MISSES, (30, 25, 14, 20, 8, 3))[0]
            self.misses[reason][0] += BLOCK_SIZE * asked.left_blocks
            self.misses[reason][1] += 1
            self._turn(asked, "prompt", "prompt")
            self.running.append(asked)

    def _take(self, asked: Asked) -> Block | None:
        if not self.unused and not self._evict():
            return None
        block = Block(self.unused.pop(), asked.tail, asked.tenant, self.now_s, used_s=self.now_s)
        (asked.tail.children if asked.tail else self.roots).append(block)
        self.blocks[block.number] = block
        block.holders.add(asked.name)
        asked.tail = block
        return block

    def _evict(self) -> bool:
        leaves = [one for one in self.blocks.values() if not one.holders and not one.children and not one.pins]
        for block in sorted(leaves, key=lambda one: one.used_s)[:400]:
            (block.parent.children if block.parent else self.roots).remove(block)
            del self.blocks[block.number]
            self.unused.append(block.number)
        for known in self.tails.values():
            known[:] = [one for one in known if self.blocks.get(one.number) is one]
        return bool(leaves)

    def _step(self) -> None:
        self._start()
        self.step += 1
        self.now_s += STEP_S
        budget, output = 192 // BLOCK_SIZE, 0
        for block in self.blocks.values():
            block.is_computing = False
        for asked in list(self.running):
            if asked.left_blocks:
                take = min(asked.left_blocks, budget)
                budget -= take
                asked.left_blocks -= take
                asked.computed += BLOCK_SIZE * take
                for _ in range(take):
                    if (taken := self._take(asked)) is not None:
                        taken.is_computing = True
                if not asked.left_blocks:
                    self._turn(asked, "answering", "answering")
                continue
            output += 1
            self._answer(asked)
        prompt = 192 - BLOCK_SIZE * budget
        told = {"step": self.step, "at_s": self.now_s, "prompt_tokens": prompt, "output_tokens": output}
        self.steps.append({**told, "rows": len(self.running), "ms": 1000 * STEP_S * self.random.uniform(0.7, 1.2)})
        self.totals["num_output_tokens"] += output
        if self.step % 200 == 0:
            self.history.append(self._row(self.now_s))

    def _answer(self, asked: Asked) -> None:
        asked.output += 1
        asked.computed += 1
        if asked.output % BLOCK_SIZE == 0:
            self._take(asked)
        if asked.output >= asked.left_tokens:
            self._let_go(asked)
            self._turn(asked, None, "finished")
        elif self.random.random() < 0.0004:
            self._let_go(asked)
            asked.left_blocks = self.random.randint(1, 6)
            self.totals["num_preemptions"] += 1
            self._turn(asked, "preempted", "preempted")
            self.waiting.appendleft(asked)

    def _let_go(self, asked: Asked) -> None:
        self.running.remove(asked)
        for block in asked.tail.chain() if asked.tail else ():
            block.holders.discard(asked.name)
            block.used_s = self.now_s
            block.pins = int(asked.tenant == "support" and block.parent is None) or block.pins
        if asked.tail is not None and len(asked.tail.chain()) < 400:
            self.tails[asked.tenant].append(asked.tail)

    def _row(self, at_s: float) -> dict[str, Any]:
        self.wave = wave = 0.97 * self.wave + 0.2 * self.random.gauss(0, 1)
        return {
            "at_s": at_s,
            "span_s": 10.0,
            "output_tokens_per_s": max(0.0, 900 + 160 * wave),
            "prompt_tokens_per_s": max(0.0, 1600 + 300 * wave + 60 * self.random.gauss(0, 1)),
            "ttft_p50_s": 0.32 * 2 ** (0.5 * wave + 0.1 * self.random.gauss(0, 1))
            if self.random.random() < 0.97
            else None,
            "hit_rate": min(1.0, max(0.0, 0.78 + 0.05 * wave)),
        }

    # -- what it tells -------------------------------------------------------------------------------------------------

    def snapshot(self, model: str = "", *, is_first: bool = True, since_step: int = 0) -> dict[str, Any]:
        """One event. A reader that has seen a step gets those after it."""
        return {
            "v": 1,
            "at_s": self.now_s,
            "model": model or "small-agent",
            "models": [
                {"name": "small-agent", "state": "ready", "is_watched": True},
                {"name": "night-shift", "state": "not_loaded", "is_watched": False},
            ],
            "pool": self._pool(),
            "tree": {"nodes": [] if self.num_members else self._nodes()},
            "steps": [one for one in self.steps if one["step"] > since_step],
            "running": [self._running(one) for one in self.running],
            "queue": self._queue(),
            "requests": [self._request(one) for one in self.recent],
            "misses": [{"reason": r, "num_tokens": t, "num_requests": n} for r, (t, n) in self.misses.items()],
            "totals": dict(self.totals),
            "history": self.history[-360:] if is_first else self.history[-1:],
            "workers": self._workers(),
            "fleet": self._fleet() if self.num_members else None,
            "warnings": [
                {
                    "tenant": "research",
                    "kind": "date",
                    "line": "Today is Wednesday, 18 November 2026, 14:03:27 UTC",
                    "num_lost_tokens": 41_216,
                    "num_requests": 93,
                }
            ],
        }

    def _pool(self) -> dict[str, Any]:
        cells, counts = bytearray(self.num_blocks), dict.fromkeys(STATES, 0)
        for number, block in self.blocks.items():
            cells[number - 1] = block.state | min(31, len(block.holders) + block.pins) << 3
            counts[STATES[block.state]] += 1
        counts["free"] = self.num_blocks - len(self.blocks)
        told = {"num_blocks": self.num_blocks, "block_size": BLOCK_SIZE, "blocks_per_cell": 1, "counts": counts}
        return {**told, "cells": "" if self.num_members else base64.b64encode(cells).decode()}

    def _nodes(self) -> list[dict[str, Any]]:
        nodes: list[dict[str, Any]] = []
        heads: deque[tuple[Block, int, int]] = deque((root, -1, 0) for root in self.roots)
        while heads and len(nodes) < 400:
            block, parent, depth = heads.popleft()
            first, length = block, 1
            while len(block.children) == 1 and block.holders == block.children[0].holders:
                block, length = block.children[0], length + 1
            told = {"id": first.number, "parent": parent, "num_tokens": length * BLOCK_SIZE, "depth": depth}
            nodes.append({**told, "num_references": len(first.holders), "cache_group": first.tenant})
            inside = sorted(block.children, key=lambda one: -len(one.holders))
            heads.extend((child, len(nodes) - 1, depth + 1) for child in inside)
        return nodes

    def _running(self, one: Asked) -> dict[str, Any]:
        phase = "prompt" if one.state == "prompt" else "answer"
        told = {"request_id": one.name, "tenant": one.tenant, "class": one.priority, "phase": phase}
        known = one.prompt + one.output
        told |= {"computed": min(one.computed, known), "known": known, "prompt_tokens": one.prompt}  # type: ignore[dict-item]
        return {**told, "cached_tokens": one.cached, "output_tokens": one.output}

    def _queue(self) -> list[dict[str, Any]]:
        sizes: dict[tuple[str, str], int] = {}
        for one in self.waiting:
            sizes[one.priority, one.tenant] = sizes.get((one.priority, one.tenant), 0) + 1
        return [{"class": c, "tenant": t, "num_requests": n} for (c, t), n in sorted(sizes.items())]

    def _request(self, one: Asked) -> dict[str, Any]:
        told = {"request_id": one.name, "tenant": one.tenant, "class": one.priority, "model": "small-agent"}
        return {**told, "state": one.state, "segments": one.segments}

    def _fleet(self) -> dict[str, Any]:
        members = [
            {
                "address": f"tcp://10.0.0.{at}:7000",
                "state": "ready" if at != 2 else "draining",
                "num_requests": self.random.randint(8, 30),
                "num_tokens_in_flight": self.random.randint(0, 4_000),
                "num_blocks": 20_000,
                "kv_usage": self.random.random(),
                "exactness": "cpu float32",
            }
            for at in range(1, self.num_members + 1)
        ]
        told = {"num_moved": 12, "num_moved_inexact": 0, "num_quarantined": 0, "num_held": 1, "hit_rate": 0.81}
        return {"members": members, **told}

    def _workers(self) -> list[dict[str, Any]]:
        died = {"number": 1, "state": "ended", "started_s": self.now_s - 3000, "ended_s": self.now_s - 900}
        lives = {"number": 2, "state": "ready", "started_s": self.now_s - 897, "ended_s": None, "why": ""}
        return [{**died, "why": "killed by signal 9"}, lives]

    def block(self, number: int) -> dict[str, Any]:
        """One of the pool, as it is asked for by its number."""
        block = self.blocks.get(number) or Block(number, None, "", self.now_s)
        is_named = number in self.blocks
        return {
            "block_id": number,
            "state": STATES[block.state] if is_named else "free",
            "ref_count": len(block.holders) + block.pins,
            "pin_count": block.pins,
            "digest": f"{number * 2654435761 % 2**64:016x}" * 4 if is_named else None,
            "cache_group": block.tenant or None,
            "tenant": block.tenant or None,
            "age_s": self.now_s - block.born_s,
            "num_tokens": BLOCK_SIZE if is_named else 0,
            "chain": [one.number for one in block.chain()] if is_named else [],
            "children": [one.number for one in block.children],
            "requests": sorted(block.holders),
        }


class Handler(BaseHTTPRequestHandler):
    """The page, the stream, and a block."""

    watch: RandomWatch
    key = ""
    pace_s = 0.5

    def do_GET(self) -> None:
        """Whatever is asked."""
        asked = urlsplit(self.path)
        paths = {DASHBOARD.path_of(name): name for name in DASHBOARD.names}
        if asked.path in paths:
            name = paths[asked.path]
            self._send(200, MEDIA_TYPES[name.rpartition(".")[2]], DASHBOARD.read(name))
        elif self.key and self.headers.get("authorization") != f"Bearer {self.key}":
            status = 403 if self.headers.get("authorization") == "Bearer common" else 401
            self._send(status, "application/json", json.dumps({"error": {"message": "expected an admin key"}}).encode())
        elif asked.path == "/v1/admin/watch":
            self._stream(parse_qs(asked.query).get("model", [""])[0])
        elif asked.path.startswith("/v1/admin/blocks/"):
            told = self.watch.block(int(asked.path.rpartition("/")[2]))
            self._send(200, "application/json", json.dumps(told).encode())
        else:
            self._send(404, "application/json", b'{"error": {"message": "there is nothing here"}}')

    def _send(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        for name, value in (("content-type", kind), ("content-length", len(body)), ("content-security-policy", CSP)):
            self.send_header(name, str(value))
        self.end_headers()
        self.wfile.write(body)

    def _stream(self, model: str) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        step = 0
        while True:
            with self.watch.lock:
                told = self.watch.snapshot(model, is_first=not step, since_step=step)
                step = self.watch.step
            self.wfile.write(b"event: snapshot\ndata: " + json.dumps(told).encode() + b"\n\n")
            time.sleep(self.pace_s)
            with self.watch.lock:
                self.watch.run(self.pace_s)

    def log_message(self, *_args: object) -> None:
        """Nobody reads it."""


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--port", type=int, default=8123)
    parser.add_argument("--blocks", type=int, default=20_000)
    parser.add_argument("--running", type=int, default=64)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--key", default="")
    parser.add_argument("--members", type=int, default=0)
    given = parser.parse_args(words)
    Handler.watch, Handler.key = RandomWatch(given.seed, given.blocks, given.running), given.key
    Handler.watch.num_members = given.members
    Handler.watch.run(60)
    ThreadingHTTPServer(("127.0.0.1", given.port), Handler).serve_forever()


if __name__ == "__main__":
    main(sys.argv[1:])
