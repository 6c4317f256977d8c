"""Write which of Debian's packages an image holds, as CycloneDX.

    ... cat /var/lib/dpkg/status | python3 -m requirements.debian leeway-api > debian.cdx.json

The lists of Python packages are known before an image is built, and `make sbom` writes them. What
Debian adds depends on the base and on the day, so it is read from the image, by
deploy/docker/check.sh.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

INSTALLED = "install ok installed"


def main() -> int:
    """Exit code 0, or 2 with a sentence."""
    if len(sys.argv) != 2:
        print("name the image, and give its /var/lib/dpkg/status on stdin", file=sys.stderr)
        return 2
    found = bill(sys.argv[1], sys.stdin.read())
    if not found["components"]:
        print(f"{sys.argv[1]} has no package of Debian installed: is that its dpkg status file?",
              file=sys.stderr)  # fmt: skip
        return 2
    json.dump(found, sys.stdout, indent=2)
    print()
    return 0


def bill(image: str, status: str) -> dict[str, Any]:
    """A CycloneDX document of what `status`, the text of dpkg's status file, says is installed."""
    components = [_component(package) for package in installed(status)]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": {"type": "container", "bom-ref": image, "name": image}},
        "components": sorted(components, key=lambda component: component["bom-ref"]),
    }


def installed(status: str) -> Iterator[dict[str, str]]:
    """The fields of each package that is installed; what was removed leaves an entry, too.

    "Package: tini\\nStatus: install ok installed\\n" -> {"Package": "tini", "Status": ...}
    """
    for entry in status.split("\n\n"):
        lines = (line for line in entry.splitlines() if line and not line[0].isspace())
        fields = {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}
        if fields.get("Status") == INSTALLED:
            yield fields


def _component(package: dict[str, str]) -> dict[str, Any]:
    name, version = package["Package"], package["Version"]
    url = f"pkg:deb/debian/{quote(name)}@{quote(version)}?arch={package['Architecture']}"
    return {"type": "library", "bom-ref": url, "name": name, "version": version, "purl": url}


if __name__ == "__main__":
    sys.exit(main())
