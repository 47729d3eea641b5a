"""Generate named content as common English words or as token ids. The same name and seed give the same content.

A common word with a space before it is one token in nearly every vocabulary, so a text of n words has about n tokens;
the server reports the exact number. Token ids are exact, for servers that accept them.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from random import Random

from quire.workload.visits import Span

_TEXT = """
    about above across add after again against air all almost along also always an and animal another answer any
    are area around as ask at away back be because become been before began begin being below best better
    between big black body book both boy but by call came can car carry certain change children city close cold
    color come complete could country cut day did do does dog door down draw during each early earth easy eat
    end enough even ever every example eye face fall family far farm fast father feet few field figure find fire
    first fish five follow food for form found four friends from get girl give go good got great ground group
    grow had hand hard has have he head hear heard help her here high him his hold home horse hours house how
    however hundred idea if important in into is it its just keep kind king knew know land large last later
    learn leave left let letter life light like line list listen little live long look low made make man many
    map mark may me mean measure men might mile miss money more morning most mother mountain move much music
    must my name near need never new next night no north not notice now number of off often old on once one only
    open or order other our out over own page paper part passed pattern people picture piece place plan plant
    play point problem put question reached read really red remember right river rock room run said same saw say
    school sea second see seem seen set several she ship short should show side since sing slowly small so some
    something sometimes song soon sound south space stand start state step still stop story study such sun sure
    table take talk tell than that the their them then there these they thing think this those thought three
    through time to today together told too took top toward town travel tree true try turn two under unit until
    up upon us use very voice walk want war was watch water way we well went were what when where which while
    white who whole why will wind with without wood word work world would write year you young your
"""
WORDS = tuple(_TEXT.split())
TOKEN_IDS = range(1_000, 30_000)
"""Ids of ordinary tokens in nearly every vocabulary: special tokens have lower or higher ids."""


@dataclass(frozen=True, slots=True)
class SpanWriter:
    """Generates the content of spans. Another seed generates other content for the same names."""

    seed: str
    token_ids: range = TOKEN_IDS

    def words(self, spans: Iterable[Span]) -> str:
        """Return text with about as many tokens as the spans have."""
        return " ".join(word for span in spans for word in self._random(span).choices(WORDS, k=span.num_tokens))

    def ids(self, spans: Iterable[Span]) -> list[int]:
        """Return exactly as many token ids as the spans have tokens."""
        return [token for span in spans for token in self._random(span).choices(self.token_ids, k=span.num_tokens)]

    def _random(self, span: Span) -> Random:
        """Return a generator seeded by the name only, so that a longer span begins like a shorter one."""
        return Random(f"{self.seed} {span.name}")
