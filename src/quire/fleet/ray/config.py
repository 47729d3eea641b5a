"""The configuration of a fleet on Ray: its application's arguments, and the config file that Ray Serve deploys.

Imports no ray: a config can be written where it is not installed. `deploy/ray/fleet.yaml` is one.

    args        what members load and gateways serve; a change replaces all replicas, one after the other
    deployments how many there are of each; a change replaces none
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec

from quire.config import Settings, load_settings
from quire.errors import ConfigError
from quire.fleet.ray.scaling import TOKENS_PER_MEMBER, ScalingRule

APP, IMPORT_PATH = "quire", "quire.fleet.ray.deployments:app"
MEMBER, GATEWAY = "Member", "Gateway"
POLICY = "quire.fleet.ray.deployments:scale_members"
UPSCALE_DELAY_S, DOWNSCALE_DELAY_S = 5.0, 120.0
"""A member that is not needed any more has a cache that may be: it stays a while."""
METRICS_EVERY_S, LOOK_BACK_S = 2.0, 6.0
END_GRACE_S = 30.0
"""Beyond the time that requests may take to finish, until Ray kills a replica that should exit."""
MAX_MEMBERS = 10_000

SettingValue = str | int | float | bool


class RayFleetArgs(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The arguments of the application. Files must be where the replicas run: nothing secret goes through Ray."""

    model: Annotated[str, msgspec.Meta(min_length=1)]
    """A directory, a .gguf file, or a hub id."""
    name: str = ""
    """The model's name for clients; empty: the last part of `model`."""
    member_keys: str = ""
    """A file of `quire fleet keys`, on every machine that has members."""
    gateway_keys: str = ""
    """The other one, on every machine that has gateways."""
    insecure_no_keys: bool = False
    """Accept clients of other machines without API keys."""
    tokens_per_member: Annotated[int, msgspec.Meta(ge=1)] = TOKENS_PER_MEMBER
    """Prompt tokens that may wait for each member before one is added."""
    settings: dict[str, SettingValue] = {}
    """Of members and gateways, by their names in a configuration file: memory, threads, host, keys_file, ..."""

    @property
    def served_name(self) -> str:
        return self.name or Path(self.model).name


def read_args(raw_args: Mapping[str, Any]) -> RayFleetArgs:
    """The arguments of a config file. Raises ConfigError."""
    try:
        args = msgspec.convert(dict(raw_args), RayFleetArgs)
    except msgspec.ValidationError as error:
        raise ConfigError(f"invalid args of a fleet on Ray: {error}; the guide lists them") from error
    if bool(args.member_keys) != bool(args.gateway_keys):
        keys = f"member_keys {args.member_keys!r} and gateway_keys {args.gateway_keys!r}"
        sentence = f"expected matching keys for members and gateways, got {keys}; name both files, or none"
        raise ConfigError(sentence, ("member_keys", "gateway_keys"))
    return args


def settings_of_args(args: RayFleetArgs) -> Settings:
    """The settings in force on this machine: the arguments' own, then the environment and the configuration file."""
    return load_settings(args.settings)


def rule_of(args: RayFleetArgs, settings: Settings) -> ScalingRule:
    """How much work one member should have."""
    return ScalingRule(args.tokens_per_member, settings.model.max_running)


@dataclass(frozen=True, slots=True)
class MemberCount:
    """How many members: a number, or a range for scaling."""

    at_least: int
    at_most: int

    @classmethod
    def parse(cls, text: str) -> "MemberCount":
        """`3`, or `1-8`. Raises ConfigError."""
        low, dash, high = text.partition("-")
        if not low.isdecimal() or (dash and not high.isdecimal()):
            rule = f"expected a number of members such as 3, or a range such as 1-8, got {text!r}"
            raise ConfigError(rule, ("members",))
        count = cls(int(low), int(high) if dash else int(low))
        if not 1 <= count.at_least <= count.at_most <= MAX_MEMBERS:
            rule = f"expected 1 to {MAX_MEMBERS} members, the smaller number first, got {text!r}"
            raise ConfigError(rule, ("members",))
        return count

    @property
    def deployment(self) -> dict[str, Any]:
        """As in a Serve config. A range for one number too: Ray replaces members whose policy changes."""
        return {
            "name": MEMBER,
            "num_replicas": "auto",
            "autoscaling_config": {
                "min_replicas": self.at_least,
                "max_replicas": self.at_most,
                "upscale_delay_s": UPSCALE_DELAY_S,
                "downscale_delay_s": DOWNSCALE_DELAY_S,
                "metrics_interval_s": METRICS_EVERY_S,
                "look_back_period_s": LOOK_BACK_S,
                "policy": {"policy_function": POLICY},
            },
        }


def serve_config(args: RayFleetArgs, members: MemberCount, num_gateways: int = 1) -> dict[str, Any]:
    """A Serve config for one fleet. `host` and `port` of the settings are where Ray's proxies listen."""
    if num_gateways < 1:
        raise ConfigError(f"expected at least 1 gateway, got {num_gateways}", ("gateways",))
    server = settings_of_args(args).server
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
