"""The result of a simulated fleet."""

from dataclasses import asdict, dataclass

from quire.sim.fleet.latencies import Spread


@dataclass(frozen=True, slots=True)
class MemberFigures:
    """Figures of one member slot."""

    number: int
    num_requests: int
    num_prompt_tokens_computed: int
    busy_s: float


@dataclass(frozen=True, slots=True)
class FleetReport:
    """The whole run."""

    num_requests: int
    num_refused: int
    num_lost: int
    """Requests that never ended: a defect."""
    num_moves: int
    num_deaths: int
    num_sent_to_dead: int
    """Requests sent to dead members before their death was detected; they moved."""
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    simulated_s: float
    ttft_s: Spread
    tpot_s: Spread
    members: tuple[MemberFigures, ...]
    log_digest: str

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens that were not computed."""
        return self.num_cached_tokens / self.num_prompt_tokens if self.num_prompt_tokens else 0.0

    @property
    def imbalance(self) -> float:
        """Maximum over mean of the prompt tokens that members computed."""
        work = [one.num_prompt_tokens_computed for one in self.members]
        return max(work) * len(work) / sum(work) if sum(work) else 1.0

    @property
    def output_tokens_per_s(self) -> float:
        """Over the simulated time."""
        return self.num_output_tokens / self.simulated_s if self.simulated_s else 0.0

    @property
    def utilisation(self) -> float:
        """The mean share of time in which members computed."""
        busy_s = sum(one.busy_s for one in self.members)
        return busy_s / (self.simulated_s * len(self.members)) if self.simulated_s else 0.0

    def as_json(self) -> dict[str, object]:
        """All figures, with the derived ones."""
        derived = ("hit_rate", "imbalance", "output_tokens_per_s", "utilisation")
        return {**asdict(self), **{name: getattr(self, name) for name in derived}}
