"""A gateway as an ASGI app, behind a third-party proxy."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from quire.api.access.keys import add_key
from quire.api.gateway_app import GatewayApp
from quire.config import load_settings
from quire.errors import ConfigError
from quire.fleet.gateway.discovery import FixedMembers
from tests.support.fleet.small_fleets import small_member


def gateway_settings(folder: Path, **flags: str) -> Any:
    return load_settings(flags, environ={"HOME": str(folder)})


async def send_request(app: Any, method: str, path: str, body: object = None, key: str = "") -> tuple[int, bytes]:
    """Send one request to the ASGI app, as a proxy would; return the status and body."""
    response_messages: list[dict[str, Any]] = []
    incoming = [{"type": "http.request", "body": json.dumps(body).encode() if body else b"", "more_body": False}]
    headers = [(b"host", b"127.0.0.1:8000"), (b"content-type", b"application/json"), (b"x-api-key", key.encode())]
    scope = {"type": "http", "method": method, "path": path, "headers": headers, "query_string": b""}

    async def receive() -> dict[str, Any]:
        if incoming:
            return incoming.pop()
        await asyncio.Event().wait()
        raise RuntimeError("unreachable: the event is never set")

    async def send(*messages: dict[str, Any]) -> None:
        response_messages.extend(messages)

    await app(scope, receive, send)
    return response_messages[0]["status"], b"".join(message.get("body", b"") for message in response_messages)


def test_a_gateway_app_serves_requests_reports_ready_and_closes_after_the_last_request(tmp_path: Path) -> None:
    async def run() -> None:
        async with small_member() as member:
            app = GatewayApp("oracle", FixedMembers([member.address]), None, gateway_settings(tmp_path))
            assert (await send_request(app.asgi, "GET", "/ready"))[0] == 503
            await app.start()
            app.check()
            assert (await send_request(app.asgi, "GET", "/ready"))[0] == 200
            request_body = {"model": "oracle", "prompt": "once", "max_tokens": 3, "ignore_eos": True}
            status, body = await send_request(app.asgi, "POST", "/v1/completions", request_body)
            assert (status, json.loads(body)["usage"]["completion_tokens"]) == (200, 3)
            assert await app.close() == 0
            assert await app.close() == 0
            assert (await send_request(app.asgi, "GET", "/ready"))[0] == 503

    asyncio.run(run())


def test_gateway_and_members_share_blocks_within_a_cache_group_and_no_further(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    groups = {"dev": "team", "ci": "team", "team": "", "other": "others"}
    secrets = {name: add_key(keys, name, cache_group=group) for name, group in groups.items()}

    async def run() -> None:
        async with small_member() as member:
            settings = gateway_settings(tmp_path, keys_file=str(keys))
            app = GatewayApp("oracle", FixedMembers([member.address]), None, settings)
            await app.start()
            cached_tokens: dict[str, int] = {}
            for name, secret in secrets.items():
                body = {"model": "oracle", "prompt": "the same prompt of a whole team", "max_tokens": 1}
                status, data = await send_request(app.asgi, "POST", "/v1/completions", body, secret)
                assert status == 200, data
                cached_tokens[name] = json.loads(data)["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert cached_tokens.pop("ci") > 0
            assert set(cached_tokens.values()) == {0}
            await app.close()

    asyncio.run(run())


def test_a_gateway_app_on_a_public_host_needs_keys(tmp_path: Path) -> None:
    async def run() -> None:
        settings = gateway_settings(tmp_path, host="0.0.0.0")  # noqa: S104 - refused
        with pytest.raises(ConfigError) as error:
            GatewayApp("oracle", FixedMembers(["tcp://127.0.0.1:1"]), None, settings)
        assert error.value.settings == ("host",)
        GatewayApp("oracle", FixedMembers(["tcp://127.0.0.1:1"]), None, settings, allow_no_keys=True)

    asyncio.run(run())
