"""Prints what a wheel requires on this machine, without some packages: for wheels that ask for what is not to be had.

Runs in a peer's own virtual environment, so it knows nothing of quire; pip brings the parser of requirements.
"""

import argparse
import re
import zipfile
from email.parser import Parser

from pip._vendor.packaging.requirements import Requirement


def requirements(wheel: str, without: list[str]) -> list[str]:
    """The lines of the wheel's metadata that hold here, extras left out."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [one for one in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", one)]
        metadata = Parser().parsestr(archive.read(name).decode())
    found = []
    for line in metadata.get_all("Requires-Dist") or []:
        one = Requirement(line)
        if one.name.lower() not in without and (one.marker is None or one.marker.evaluate({"extra": ""})):
            found.append(str(one).partition(";")[0].strip())
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="What a wheel requires on this machine.")
    parser.add_argument("wheel")
    parser.add_argument("--without", nargs="*", default=[])
    given = parser.parse_args()
    print("\n".join(requirements(given.wheel, given.without)))
