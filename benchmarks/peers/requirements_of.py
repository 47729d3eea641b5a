"""Prints the requirements of a wheel on this machine, without some packages that pip cannot install as required.

Runs in a peer's own virtual environment, so it imports nothing of quire; pip contains the parser of requirements.
"""

import argparse
import re
import zipfile
from email.parser import Parser

from pip._vendor.packaging.requirements import Requirement


def requirements(wheel: str, without: list[str]) -> list[str]:
    """Return the requirements in the wheel's metadata that apply here, without extras."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [one for one in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", one)]
        metadata = Parser().parsestr(archive.read(name).decode())
    lines = []
    for line in metadata.get_all("Requires-Dist") or []:
        one = Requirement(line)
        if one.name.lower() not in without and (one.marker is None or one.marker.evaluate({"extra": ""})):
            lines.append(str(one).partition(";")[0].strip())
    return lines


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Print the requirements of a wheel on this machine.")
    parser.add_argument("wheel")
    parser.add_argument("--without", nargs="*", default=[])
    given = parser.parse_args()
    print("\n".join(requirements(given.wheel, given.without)))
