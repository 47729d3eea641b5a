"""The configuration of a fleet on Ray: the application's arguments, and the config file that Ray Serve deploys.

Does not import ray, so that a config can be written on machines without it. `deploy/ray/fleet.yaml` is an example.

    args        the model and its settings; a change replaces all replicas, one after another
    deployments the numbers of members and gateways; a change replaces no replica
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec

from quire.config import Settings, load_settings
from quire.errors import ConfigError

APP, IMPORT_PATH = "quire", "quire.fleet.ray.deployments:app"
MEMBER, GATEWAY = "Member", "Gateway"
POLICY = "quire.fleet.ray.deployments:scale_members"
UPSCALE_DELAY_S, DOWNSCALE_DELAY_S = 5.0, 120.0
"""Scaling down is slower, because the cache of an idle member may still be useful."""
METRICS_EVERY_S, LOOK_BACK_S = 2.0, 6.0
END_GRACE_S = 30.0
"""Time after a replica's drain limit until Ray kills it."""
MAX_MEMBERS = 10_000
TOKENS_PER_MEMBER = 4096
"""Default of `tokens_per_member`: a few seconds of prefill on a CPU, less than one on a GPU."""

SettingValue = str | int | float | bool


class RayFleetArgs(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Arguments of the application. Key files must exist on the replicas' machines; no secret goes through Ray."""

    model: Annotated[str, msgspec.Meta(min_length=1)]
    """A directory, a .gguf file, or a Hub id."""
    name: str = ""
    """The model's name for clients; empty: the last path component of `model`."""
    member_keys: str = ""
    """Path of member.json from `quire fleet keys`, on every machine with members."""
    gateway_keys: str = ""
    """Path of gateway.json from `quire fleet keys`, on every machine with gateways."""
    insecure_no_keys: bool = False
    """Accept clients on other machines without API keys."""
    tokens_per_member: Annotated[int, msgspec.Meta(ge=1)] = TOKENS_PER_MEMBER
    """Waiting prompt tokens per member above which members are added."""
    settings: dict[str, SettingValue] = {}
    """Settings of members and gateways, with the keys of a configuration file: memory, threads, host, keys_file, ..."""

    @property
    def served_name(self) -> str:
        return self.name or Path(self.model).name


def read_args(raw_args: Mapping[str, Any]) -> RayFleetArgs:
    """Parse the arguments of a config file. Raises ConfigError."""
    try:
        args = msgspec.convert(dict(raw_args), RayFleetArgs)
    except msgspec.ValidationError as error:
        raise ConfigError(f"invalid args of a fleet on Ray: {error}; the guide lists them") from error
    if bool(args.member_keys) != bool(args.gateway_keys):
        keys = f"member_keys {args.member_keys!r} and gateway_keys {args.gateway_keys!r}"
        message = f"expected matching keys for members and gateways, got {keys}; name both files, or none"
        raise ConfigError(message, ("member_keys", "gateway_keys"))
    return args


def settings_from(args: RayFleetArgs) -> Settings:
    """Return the effective settings on this machine: arguments first, then environment and configuration file."""
    return load_settings(args.settings)


@dataclass(frozen=True, slots=True)
class MemberCount:
    """The number of members, or its range for autoscaling."""

    min_members: int
    max_members: int

    @classmethod
    def parse(cls, text: str) -> "MemberCount":
        """Parse `3` or `1-8`. Raises ConfigError."""
        min_text, dash, max_text = text.partition("-")
        if not min_text.isdecimal() or (dash and not max_text.isdecimal()):
            message = f"expected a number of members such as 3, or a range such as 1-8, got {text!r}"
            raise ConfigError(message, ("members",))
        count = cls(int(min_text), int(max_text) if dash else int(min_text))
        if not 1 <= count.min_members <= count.max_members <= MAX_MEMBERS:
            message = f"expected 1 to {MAX_MEMBERS} members, the smaller number first, got {text!r}"
            raise ConfigError(message, ("members",))
        return count

    @property
    def deployment(self) -> dict[str, Any]:
        """The member deployment in a Serve config. A fixed number is a range too, because Ray replaces all members when
        the kind of scaling changes."""
        return {
            "name": MEMBER,
            "num_replicas": "auto",
            "autoscaling_config": {
                "min_replicas": self.min_members,
                "max_replicas": self.max_members,
                "upscale_delay_s": UPSCALE_DELAY_S,
                "downscale_delay_s": DOWNSCALE_DELAY_S,
                "metrics_interval_s": METRICS_EVERY_S,
                "look_back_period_s": LOOK_BACK_S,
                "policy": {"policy_function": POLICY},
            },
        }


def serve_config(args: RayFleetArgs, members: MemberCount, num_gateways: int = 1) -> dict[str, Any]:
    """Return a Serve config for one fleet. Ray's proxies listen on `host` and `port` of the settings. Raises
    ConfigError below 1 gateway."""
    if num_gateways < 1:
        raise ConfigError(f"expected at least 1 gateway, got {num_gateways}", ("gateways",))
    server = settings_from(args).server
    return {
        "proxy_location": "HeadOnly" if server.is_loopback else "EveryNode",
        "http_options": {"host": server.host, "port": server.port},
        "applications": [
            {
                "name": APP,
                "route_prefix": "/",
                "import_path": IMPORT_PATH,
                "args": msgspec.to_builtins(args),
                "deployments": [members.deployment, {"name": GATEWAY, "num_replicas": num_gateways}],
            }
        ],
    }
