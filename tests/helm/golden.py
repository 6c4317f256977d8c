"""The objects of a release by component, kept in golden/; `python -m tests.helm.golden` writes it.

Parsed objects, never text: Helm 3 and 4 differ in blank lines. A difference is either a mistake or
a change to be read and written again.
"""

from __future__ import annotations

from pathlib import Path

import yaml

from tests.helm.chart import Document, objects

FOLDER = Path(__file__).parent / "golden"
KEPT = ("default", "full", "outside")
"""Of ci/: as it comes, everything on, everything from outside."""


def by_component(ci: str) -> dict[str, list[Document]]:
    """The objects, sorted; what carries no component is `extra`."""
    found: dict[str, list[Document]] = {}
    for document in sorted(objects(ci), key=lambda d: (d["kind"], d["metadata"]["name"])):
        labels = document["metadata"].get("labels", {})
        component = labels.get("app.kubernetes.io/component", "extra")
        found.setdefault(component, []).append(document)
    # Their text is that of deploy/, which has tests of its own.
    for document in found.get("alerts", []):
        document["spec"] = "(deploy/prometheus/alerts.yaml)"
    for document in found.get("dashboard", []):
        document["data"] = dict.fromkeys(document["data"], "(deploy/grafana)")
    return found


def kept(ci: str) -> dict[str, list[Document]]:
    """What golden/CI holds."""
    files = sorted((FOLDER / ci).glob("*.yaml"))
    return {f.stem: list(yaml.load_all(f.read_text(), yaml.CSafeLoader)) for f in files}


class _Plain(yaml.CSafeDumper):
    """Without anchors: each object can be read by itself."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def write() -> None:
    """Replace golden/."""
    for ci in KEPT:
        folder = FOLDER / ci
        folder.mkdir(parents=True, exist_ok=True)
        components = by_component(ci)
        for file in folder.glob("*.yaml"):
            if file.stem not in components:
                file.unlink()
        for component, documents in components.items():
            text = yaml.dump_all(documents, Dumper=_Plain, sort_keys=True, width=100)
            (folder / f"{component}.yaml").write_text(text)


if __name__ == "__main__":
    write()
