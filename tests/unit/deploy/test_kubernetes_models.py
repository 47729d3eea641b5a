"""Every manifest of deploy/kubernetes is what Kubernetes takes. There is no cluster here to apply them to."""

from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import lightkube  # type: ignore[import-not-found,import-untyped,unused-ignore]  # noqa: F401 - where it is not installed, nothing here can run
import pytest
import yaml  # type: ignore[import-untyped]

from tests.support.fleet.kubernetes_models import GROUPS, part_problems, problems

MANIFESTS = Path(__file__).parents[3] / "deploy" / "kubernetes"
DOCUMENTS = [
    (file.name, one) for file in sorted(MANIFESTS.glob("*.yaml")) for one in yaml.safe_load_all(file.read_text())
]


def only(required: str = "", **properties: Any) -> dict[str, Any]:
    """A table of these fields and no others."""
    return {"type": "object", "additionalProperties": False, "required": required.split(), "properties": properties}


TEXT, NUMBER = {"type": "string"}, {"type": "integer", "minimum": 0}
ANYTHING: dict[str, Any] = {}
TEXTS = {"type": "object", "additionalProperties": TEXT}
GROUP = {"rayStartParams": TEXTS, "template": ANYTHING}
NAMED = {"apiVersion": TEXT, "kind": TEXT, "metadata": only("name", name=TEXT, labels=TEXTS)}
STRANGERS = {
    # As their own definitions have them, as far as we use them; what lies in ANYTHING is held to Kubernetes' models.
    "RayService": only(
        "spec",
        **NAMED,
        spec=only(
            "rayClusterConfig",
            serveConfigV2=TEXT,
            rayClusterConfig=only(
                "headGroupSpec",
                rayVersion=TEXT,
                authOptions=only(mode={"enum": ["disabled", "token"]}, secretName=TEXT),
                enableInTreeAutoscaling={"type": "boolean"},
                headGroupSpec=only("template", **GROUP),
                workerGroupSpecs={
                    "type": "array",
                    "items": only(
                        "groupName minReplicas maxReplicas template",
                        groupName=TEXT,
                        replicas=NUMBER,
                        minReplicas=NUMBER,
                        maxReplicas=NUMBER,
                        **GROUP,
                    ),
                },
            ),
        ),
    ),
    "ScaledObject": only(
        "spec",
        **NAMED,
        spec=only(
            "scaleTargetRef triggers",
            scaleTargetRef=only("name", apiVersion=TEXT, kind=TEXT, name=TEXT),
            minReplicaCount=NUMBER,
            maxReplicaCount=NUMBER,
            pollingInterval=NUMBER,
            advanced=only(horizontalPodAutoscalerConfig=only(behavior=ANYTHING)),
            triggers={"type": "array", "items": only("type metadata", type=TEXT, metadata=TEXTS)},
        ),
    ),
    "ServiceMonitor": only(
        "spec",
        **NAMED,
        spec=only(
            "selector endpoints",
            selector=only(matchLabels=TEXTS),
            endpoints={
                "type": "array",
                "items": only(
                    port=TEXT,
                    path=TEXT,
                    interval=TEXT,
                    authorization=only(type=TEXT, credentials=only("name key", name=TEXT, key=TEXT)),
                ),
            },
        ),
    ),
}


@pytest.mark.parametrize(("file", "document"), DOCUMENTS, ids=[f"{file} {one['kind']}" for file, one in DOCUMENTS])
def test_every_manifest_is_what_kubernetes_takes(file: str, document: dict[str, Any]) -> None:
    if document["apiVersion"] in GROUPS:
        assert problems(document) == []
        return
    jsonschema.validate(document, STRANGERS[document["kind"]])
    if document["kind"] == "RayService":
        cluster = document["spec"]["rayClusterConfig"]
        for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
            assert part_problems(group["template"], "core_v1", "PodTemplateSpec", "template") == []
    elif document["kind"] == "ScaledObject":
        behavior = document["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
        kind = "HorizontalPodAutoscalerBehavior"
        assert part_problems(behavior, "autoscaling_v2", kind, "behavior") == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda spec: spec.update(replica=2), "has no field replica"),
        (lambda spec: spec.update(replicas="2"), "is of int, not '2'"),
        (lambda spec: spec.pop("selector"), "lacks selector"),
        (lambda spec: spec["template"]["spec"]["containers"][0].pop("name"), "lacks name"),
        (lambda spec: spec["template"]["spec"].update(containers={}), "is a list"),
        (lambda spec: spec["template"]["spec"]["containers"][0].update(prots=[]), "has no field prots"),
    ],
)
def test_a_manifest_with_a_mistake_is_refused(change: Any, words: str) -> None:
    (document,) = [one for _, one in DOCUMENTS if one["kind"] == "StatefulSet"]
    copied = yaml.safe_load(yaml.safe_dump(document))
    change(copied["spec"])
    assert any(words in problem for problem in problems(copied)), problems(copied)
