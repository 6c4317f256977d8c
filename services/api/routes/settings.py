"""Settings that may be changed while the run goes on."""

from __future__ import annotations

from collections.abc import Mapping

from fastapi import APIRouter, HTTPException, Request, Response

from leeway.replay.run_records import LiveSettings
from leeway.services.api.examples import example
from leeway.services.api.problems import documented
from leeway.services.api.reader import Look
from leeway.services.api.resources import SettingInfo, Settings, SettingsChange
from leeway.services.api.served import Served, answer
from leeway.services.config import RunConfig
from leeway.services.live_settings import LIVE_KEYS, changed, text_of, value_of


def settings_router(served: Served) -> APIRouter:
    """`/v1/settings`."""
    router = APIRouter(prefix="/v1", tags=["settings"])

    @router.get("/settings", response_model=Settings, responses=example("settings"))
    async def settings(request: Request) -> Response:
        """What can be changed, its value, and who goes by it already."""
        look = await served.reader.look()
        found = settings_of(served.config, await served.board.settings(), look)
        return answer(request, found.model_dump_json().encode())

    @router.patch("/settings", responses={**example("settings"), **documented(412)})
    async def change(request: Request, body: SettingsChange) -> Settings:
        """Change some. The learner applies its own before its next step, the workers theirs within
        two seconds; read `applied` until `is_applied`. With `If-Match` (the ETag of the GET) it is
        refused where somebody else has changed them meanwhile.
        """
        before = await served.board.settings()
        wanted = request.headers.get("if-match")
        if wanted is not None and wanted != "*":
            look = await served.reader.look()
            current = settings_of(served.config, before, look).model_dump_json().encode()
            if answer(request, current).headers["etag"] != wanted:
                raise HTTPException(412, "the settings are others by now; read them again")
        changed(served.config, {**before.values, **body.values})
        after = await served.board.change_settings(body.values)
        words = ", ".join(f"{key} = {value:g}" for key, value in sorted(body.values.items()))
        await served.board.append_event("settings", f"revision {after.revision}: {words}")
        return settings_of(served.config, after, await served.reader.look(max_age_s=0))

    return router


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
                applied_by="learner" if key.startswith("learner.") else "rollout",
                text=text_of(key),
            )
            for key in LIVE_KEYS
        ],
        applied=dict(revisions),
        is_applied=all(revision >= live.revision for revision in revisions.values()),
    )
