"""Settings that may be changed while the run goes on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final

from fastapi import APIRouter, HTTPException, Response

from leeway.replay.run_records import LiveSettings
from leeway.services.api.examples import example, sent
from leeway.services.api.parameters import IfMatch
from leeway.services.api.problems import documented, validating
from leeway.services.api.reader import Look, answer_deadline
from leeway.services.api.resources import SettingInfo, Settings, SettingsChange
from leeway.services.api.served import Served
from leeway.services.api.tags import names
from leeway.services.config import RunConfig
from leeway.services.live_settings import LIVE_KEYS, bounds_of, changed, text_of, value_of

PATH: Final = "/v1/settings"
NUM_TRIES: Final = 10
"""How often a change is tried anew when somebody else was faster."""


def settings_router(served: Served) -> APIRouter:
    """`/v1/settings`."""
    router = APIRouter(prefix="/v1", tags=["settings"])

    @router.get("/settings", responses=example("settings"))
    async def settings(response: Response) -> Settings:
        """What can be changed, its value, and who goes by it already. The ETag is that of the
        revision, so the answer always comes in full.
        """
        look = await served.reader.look()
        live = await _stored(served)
        response.headers["ETag"] = tag_of(live)
        return settings_of(served.config, live, look)

    @router.patch("/settings", responses={**example("settings"), **documented(409, 412)})
    async def change(
        response: Response,
        body: Annotated[SettingsChange, sent("settings")],
        if_match: IfMatch = None,
    ) -> Settings:
        """Change some. The learner applies its own before its next step, the workers theirs within
        two seconds; read `applied` until `is_applied`. With `If-Match` (the ETag of the GET) it is
        refused where somebody else has changed them meanwhile.
        """
        after = await _change(served, body.values, if_match)
        words = ", ".join(f"{key} = {value:g}" for key, value in sorted(body.values.items()))
        await served.note("settings", f"revision {after.revision}: {words}")
        response.headers["ETag"] = tag_of(after)
        return settings_of(served.config, after, await served.reader.look(max_age_s=0))

    return router


def tag_of(live: LiveSettings) -> str:
    """The ETag of settings: of their revision, and not of who goes by it already."""
    return f'"revision-{live.revision}"'


async def _stored(served: Served) -> LiveSettings:
    async with answer_deadline():
        return await served.board.settings()


async def _change(
    served: Served, values: Mapping[str, float], if_match: str | None
) -> LiveSettings:
    """Check the sum of what stands and `values`, and write it if that still stands."""
    for _ in range(NUM_TRIES):
        before = await _stored(served)
        if if_match is not None and not names(if_match, tag_of(before)):
            raise HTTPException(412, "the settings are others by now; read them again")
        with validating():
            changed(served.config, {**before.values, **values})
        async with answer_deadline():
            after = await served.board.change_settings(values, before)
        if after is not None:
            return after
    raise HTTPException(409, "others change the settings all the while; try again")


def settings_of(config: RunConfig, live: LiveSettings, look: Look) -> Settings:
    """Every setting with its value now, and the revision of everybody who is alive."""
    revisions: Mapping[str, int] = {
        name: section.get("settings_revision", 0) for name, section in look.each("rollout")
    }
    if look.section("learner") or look.phase == "training":
        own = look.section("learner").get("settings_revision", 0)
        revisions = {"learner": own, **revisions}
    return Settings(
        revision=live.revision,
        settings=[
            SettingInfo(
                key=key,
                value=live.values.get(key, value_of(config, key)),
                started_with=value_of(config, key),
                **bounds_of(key)._asdict(),
                applied_by="learner" if key.startswith("learner.") else "rollout",
                text=text_of(key),
            )
            for key in LIVE_KEYS
        ],
        applied=dict(revisions),
        is_applied=all(revision >= live.revision for revision in revisions.values()),
    )
