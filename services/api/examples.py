"""One example of each answer and of each body that is sent, as openapi.json shows them; tests hold
them against the models.
"""

from __future__ import annotations

from typing import Any, Final

from fastapi import Body

from leeway.replay.schema import SCHEMA_VERSION

RUN: Final = "demo-20261127-143000"
"""Names, as the examples have them."""
SWEEP: Final = "lags-1"
ARM: Final = "grpo-lag8-seed0"
TRAJECTORY: Final = "9f2c-0"
_SECONDS: Final = {
    "rollout": {"waiting_s": 10.0, "working_s": 90.0},
    "learner": {"waiting_s": 20.0, "working_s": 60.0},
}
_LINK: Final = {
    "waiter": "rollout",
    "reason": "window",
    "num_waiting": 2,
    "since_s": 3.5,
    "awaited": "learner",
    "held": {"id": "9f2c", "version": 7, "since_s": 2.0, "expires_in_s": 298.0, "num_groups": 16},
}
_REPLAY: Final = {
    "num_slots": 3,
    "num_ready": 2,
    "num_leased": 16,
    "num_held_back": 0,
    "num_bytes": 183_000,
    "num_trained": 112,
    "num_dropped": 1,
    "dropped": {"timeout": 1},
    "dropped_turns": {"timeout": {"4": 8}},
    "dropped_tokens": {"timeout": {"512": 8}},
    "admission_paused": False,
    "seconds": _SECONDS,
    "waits": [_LINK],
}
_LEARNING: Final = {
    "reward": 0.52,
    "exact_match": 0.55,
    "entropy": 0.41,
    "kl": 0.004,
    "grad_norm": 0.8,
    "clip_fraction": 0.02,
    "clip_bias_norm": 0.11,
    "tokens_per_s": 640.0,
}
_STALENESS: Final = {"mean": 1.4, "max": 3, "max_seen": 4, "bound": 4}
_WATCHDOG: Final = {
    "waits": "learner waits for 4 groups",
    "verdict": None,
    "stages": [
        {"name": "learner", "idle_s": 3.2, "deadline_s": 3600.0},
        {"name": "rollouts", "idle_s": 0.4, "deadline_s": 1800.0},
    ],
}
_LOOPS: Final = [{"process": "learner", "lag_s": 0.012, "pid": 4711}]
_EVAL: Final = {"before": 0.31, "latest": 0.44, "latest_step": 40}
_WORKER: Final = {
    "worker_id": "worker-0",
    "num_groups_in_flight": 2,
    "num_episodes_in_flight": 11,
    "episodes_by_stage": {"generating": {"10s": 9}, "searching": {"10s": 1, "1m": 1}},
    "oldest_episode_s": {"generating": 4.2, "searching": 12.0},
    "stop_reasons": {"answer": 870, "turns": 26},
    "failures": {"timeout": 1},
    "num_groups_added": 112,
    "num_turns": 2140,
    "num_tokens": 61_000,
    "wait_share": 0.12,
    "last_refusal": None,
    "retriever": {
        "num_searches": 1270,
        "num_failed": 0,
        "num_in_flight": 2,
        "mean_s": 0.004,
        "last_error": None,
        "last_success_at": 1_795_870_000.0,
    },
    "settings_revision": 0,
}
_TRAJECTORY: Final = {
    "trajectory_id": TRAJECTORY,
    "group_id": "9f2c",
    "question_id": "train-17",
    "question": "Which currency is used in Denmark?",
    "golden_answers": ["krone"],
    "is_failed": False,
    "reward": 1.0,
    "stop_reason": "answer",
    "duration_s": 2.1,
    "num_turns": 2,
    "num_tokens": 181,
    "num_trained_tokens": 40,
    "oldest_version": 6,
    "scores": {"exact_match": 1.0},
    "worker_id": "worker-0",
}
_RUN: Final = {
    "name": RUN,
    "is_current": True,
    "state": "running",
    "phase": "training",
    "started_at": 1_795_869_000.0,
    "step": 7,
    "exact_match": None,
}
_CONTROL: Final = {
    "action": "checkpoint",
    "request_id": "5f1d0c9a3b7e2468",
    "state": "done",
    "detail": "a checkpoint of version 7 is on the disk",
    "asked_at": 1_795_870_000.0,
    "deadline_at": 1_795_870_600.0,
}

_SWEEP: Final = {
    "name": SWEEP,
    "phase": "running",
    "num_arms": 24,
    "num_ended": 9,
    "num_failed": 0,
    "num_collapsed": 1,
    "running": ["grpo-lag8-seed1"],
    "rates": {"grpo": 0.0001},
    "updated_at": 1_795_870_000.0,
}
_SWEEP_ROW: Final = {
    "arm": ARM,
    "series": "grpo",
    "objective": "grpo",
    "variant": {},
    "seed": 0,
    "learning_rate": 0.0001,
    "is_scan": False,
    "status": "finished",
    "reason": None,
    "staleness_set": 8,
    "staleness": 7.9,
    "staleness_max": 8.0,
    "score": 0.41,
    "score_before": 0.31,
    "score_best": 0.42,
    "collapse_step": None,
    "steps": 60,
    "num_ramp_steps": 8,
    "wall_s": 412.0,
    "clip_fraction_tokens": 0.02,
    "clip_fraction_turns": 0.11,
    "ctn_norm": 0.11,
    "ctn_norm_max": 0.4,
    "num_rescaled": 0,
    "grad_norm": 0.8,
    "num_spikes": 1,
    "effective_sample_size": 0.97,
    "kl": 0.004,
    "kl_max": 0.02,
    "entropy": 0.41,
    "entropy_last": 0.36,
    "think_tokens": 18.0,
    "think_tokens_last": 16.5,
}

EXAMPLES: Final[dict[str, Any]] = {
    "status": {
        "run": {
            "name": RUN,
            "phase": "training",
            "elapsed_s": 412.0,
            "step": 7,
            "num_steps": 60,
            "policy_version": 7,
            "last_event": "step 0: held-out exact match 0.310",
        },
        "engines": [
            {
                "engine_id": "engine-4711",
                "version": 6,
                "pause_ms": 12.0,
                "transfer_ms": 85.0,
                "tokens_per_s": 3000.0,
            }
        ],
        "generated_tokens_per_s": 3000.0,
        "learning": _LEARNING,
        "staleness": _STALENESS,
        "replay": _REPLAY,
        "waits": {
            "learner_for_data": 0.25,
            "rollouts_for_room": 0.12,
            "sentence": "learner waits for rollouts 25 %, rollouts wait for the learner 12 %",
            "refusal": None,
        },
        "watchdog": _WATCHDOG,
        "loops": _LOOPS,
        "eval": _EVAL,
        "config": {"objective": "so-grpo"},
    },
    "runs": {"items": [_RUN], "next": None},
    "run": _RUN,
    "rollouts": {
        "num_workers": 1,
        "num_groups_in_flight": 2,
        "num_episodes_in_flight": 11,
        "episodes_by_stage": {"generating": {"10s": 9}, "searching": {"10s": 1, "1m": 1}},
        "stop_reasons": {"answer": 870, "turns": 26},
        "failures": {"timeout": 1},
        "retriever": "healthy",
        "workers": [_WORKER],
    },
    "policy": {
        "learner_version": 7,
        "live_versions": {"6": 1},
        "engines": [
            {
                "engine_id": "engine-4711",
                "version": 6,
                "num_behind": 1,
                "pause_ms": 12.0,
                "transfer_ms": 85.0,
                "tokens_per_s": 3000.0,
                "num_tokens": 61_000,
                "num_prompt_tokens": 205_000,
                "num_cached_tokens": 148_000,
                "num_discarded_tokens": 0,
                "num_requests": 2140,
                "num_in_flight": 11,
            }
        ],
        "publishes": [
            {
                "version": 6,
                "at": 1_795_870_000.0,
                "num_engines": 1,
                "num_bytes": 9_400_000,
                "checksum": "4ee6bf4fdd4b0b4f",
                "transfer_s": 0.085,
                "pause_s": [0.012],
                "evicted": {},
            }
        ],
    },
    "replay": {
        **_REPLAY,
        "size": 18,
        "learner_version": 7,
        "limiter": "rollouts wait for the learner (window), for 4 s now",
        "limits": {"groups_per_step": 16, "max_staleness": 4},
        "wait_split": {
            side: {**seconds, "waiting_share": share}
            for (side, seconds), share in zip(_SECONDS.items(), (0.1, 0.25), strict=True)
        },
        "staleness_histogram": {"0": 120, "1": 300, "2": 260, "4": 216},
        "staleness_over": 0,
        "outstanding": {"6": 5, "7": 16},
        "slots": [
            {"id": "a1b2", "version": 7, "since_s": 1.0, "expires_in_s": 119.0, "num_groups": 1}
        ],
        "leases": [_LINK["held"]],
        "num_admitted": 134,
        "num_added": 130,
        "num_drawn": 128,
        "num_slots_expired": 0,
        "num_leases_expired": 0,
    },
    "learner": {
        "step": 7,
        "num_steps": 60,
        "version": 7,
        "objective": "so-grpo",
        "idle_share": 0.25,
        "learning": _LEARNING,
        "staleness": _STALENESS,
        "eval": {
            **_EVAL,
            "history": [{"step": 0, "exact_match": 0.31}, {"step": 40, "exact_match": 0.44}],
        },
        "metrics": {"loss": -0.01, "reward_mean": 0.52},
        "updated_at": 1_795_870_000.0,
        "settings_revision": 0,
    },
    "steps": {
        "items": [{"step": 7, "time": 1_795_870_000.0, "wait_s": 1.2, "reward_mean": 0.52}],
        "next": None,
    },
    "trajectories": {"items": [_TRAJECTORY], "next": "41"},
    "trajectory": {
        **_TRAJECTORY,
        "prompt": "Question: Which currency is used in Denmark?\n",
        "turns": [
            {
                "action": "search",
                "generated": "<search>currency Denmark</search>",
                "observed": "<information>Denmark uses the krone.</information>",
                "num_generated": 18,
                "num_observed": 120,
                "reward": None,
                "oldest_version": 6,
                "newest_version": 6,
            },
            {
                "action": "answer",
                "generated": "<answer>krone</answer>",
                "observed": "",
                "num_generated": 22,
                "num_observed": 0,
                "reward": None,
                "oldest_version": 6,
                "newest_version": 7,
            },
        ],
    },
    "control": _CONTROL,
    "paused": {
        **_CONTROL,
        "action": "pause",
        "request_id": None,
        "detail": "admission is closed",
        "deadline_at": None,
    },
    "settings": {
        "revision": 1,
        "settings": [
            {
                "key": "learner.learning_rate",
                "value": 0.00005,
                "started_with": 0.0001,
                "minimum": 0.0,
                "maximum": None,
                "is_minimum_allowed": False,
                "is_whole": False,
                "applied_by": "learner",
                "text": "Step size of AdamW, constant after the warm-up.",
            }
        ],
        "applied": {"learner": 1, "worker-0": 1},
        "is_applied": True,
    },
    "slots": {
        "items": [{"slot_id": "a1b2", "version": 7, "ticket": "Zk0f...", "expires_in_s": 120.0}],
        "schema_version": SCHEMA_VERSION,
        "learner_version": 7,
        "group_size": 8,
        "max_trajectory_tokens": 1024,
    },
    "returned": {"slot_id": "a1b2", "state": "dropped"},
    "group": {
        "group_id": "a1b2",
        "state": "added",
        "num_trajectories": 8,
        "num_trained_tokens": 310,
    },
    "sweeps": {"items": [_SWEEP], "next": None},
    "sweep": {
        "status": _SWEEP,
        "mode": "exact",
        "retention": 0.95,
        "verdicts": [
            {
                "series": "grpo",
                "on_policy": 0.43,
                "kept_staleness": 7.9,
                "kept_score": 0.41,
                "lost_staleness": 15.8,
                "lost_score": 0.22,
                "num_seeds": 3,
                "num_failed": 0,
                "num_collapsed": 1,
                "sentence": "grpo keeps 95 % of its on-policy score up to staleness 7.9",
            }
        ],
        "points": [
            {
                "series": "grpo",
                "staleness_set": 8,
                "staleness": 7.9,
                "scores": [0.4, 0.41, 0.42],
                "mean": 0.41,
                "low": 0.38,
                "high": 0.44,
                "best": 0.42,
                "num_arms": 3,
                "num_failed": 0,
                "num_collapsed": 0,
                "ramp_share": 0.13,
            }
        ],
    },
    "rows": {"items": [_SWEEP_ROW], "next": None},
    "ok": {"status": "ok", "reasons": []},
    "not-ready": {"status": "not-ready", "reasons": ["no engine has registered yet"]},
}

SENT: Final[dict[str, Any]] = {
    "slots": {"num": 1, "wait_s": 5.0},
    "returned": {"ticket": "Zk0f...", "reason": "outside-failed"},
    "settings": {"values": {"learner.learning_rate": 0.00005}},
    "group": {
        "schema_version": SCHEMA_VERSION,
        "ticket": "Zk0f...",
        "question_id": "train-17",
        "worker_id": "outside",
        "trajectories": [
            {
                "trajectory_id": "mine-0",
                "token_ids": [5, 9, 11, 40, 41, 60, 61, 62, 42],
                "num_prompt": 3,
                "turns": [
                    {"num_generated": 2, "num_observed": 3, "action": "search"},
                    {"num_generated": 1, "num_observed": 0, "action": "answer"},
                ],
                "logprobs": [-0.2, -1.5, -0.01],
                "versions": [6, 6, 7],
                "reward": 1.0,
                "stop_reason": "answer",
                "scores": {"exact_match": 1.0},
                "duration_s": 2.1,
                "turn_rewards": None,
            }
        ],
    },
}
"""Bodies of requests, by the name of what they get back."""

_MESSAGE: Final = {
    "type": "object",
    "required": ["id", "event", "data"],
    "properties": {
        "id": {"type": "string"},
        "event": {"type": "string", "enum": ["event", "status", "step", "trajectory"]},
        "data": {"type": "string", "description": "JSON"},
    },
}
"""Of each message of the stream; its `data` is what the route of that name gives."""

_EVENTS: Final = (
    "id: 1795870000000-0.7\nevent: event\n"
    'data: {"event_id":"1795870000000-0","time_s":1795870000.0,"kind":"run","text":"started"}\n\n'
)


def example(name: str) -> dict[int | str, dict[str, Any]]:
    """`responses` of a route whose answer looks like this."""
    if name == "events":
        stream = {"schema": _MESSAGE, "example": _EVENTS}
        return {200: {"description": "The stream", "content": {"text/event-stream": stream}}}
    return {200: shown(name)}


def shown(name: str) -> dict[str, Any]:
    """Of `responses`, for an answer that looks like this."""
    return {"content": {"application/json": {"example": EXAMPLES[name]}}}


def sent(name: str) -> Any:
    """Of a route's argument: a JSON body that looks like this."""
    return Body(openapi_examples={"example": {"value": SENT[name]}})
