"""The orders about jobs."""

from __future__ import annotations

from outboxio.dashboard.asked import Asked
from outboxio.dashboard.fields import Fields
from outboxio.dashboard.ordering import after, carried_out, confirmation_of, given
from outboxio.dashboard.view import Done, View


async def pause(asked: Asked, form: Fields) -> Done | View:
    """Pause a job."""
    name = given(form, "job")
    confirmation = confirmation_of("pause_job", form, f"Pause the job {name}?", [
        "No run of the job starts, in any process, until an operator unpauses the job. A run under way goes on.",
        "The moments of the schedule that come meanwhile are left out.",
    ], f"Pause {name}", right="pause", job=name)  # fmt: skip
    return await after(confirmation, asked, form, lambda reason: asked.admin.pause_job(name, reason=reason))


async def unpause(asked: Asked, form: Fields) -> Done | View:
    """End the pause of a job, at once."""
    name = given(form, "job")
    return await carried_out("unpause_job", asked, form, lambda reason: asked.admin.unpause_job(name, reason=reason))


async def run_now(asked: Asked, form: Fields) -> Done | View:
    """Run a job now."""
    name = given(form, "job")
    confirmation = confirmation_of("run_job_now", form, f"Run the job {name} now?", [
        "A process with the job begins a run within about a second, also if the job is paused.",
        "A run under way comes to its end first. The moments of the schedule stay.",
    ], f"Run {name}", right="run_job", job=name)  # fmt: skip
    return await after(confirmation, asked, form, lambda reason: asked.admin.run_job_now(name, reason=reason))


async def remove(asked: Asked, form: Fields) -> Done | View:
    """Forget a job that no process has any more."""
    name = given(form, "job")
    confirmation = confirmation_of("remove_job", form, f"Remove the row of the job {name}?", [
        "For a job that no process has any more: its counts, its last error and its pause are gone.",
        "A process that still has the job inserts a new row within about a minute.",
    ], f"Remove {name}", typed=name, right="unsubscribe", job=name)  # fmt: skip
    return await after(confirmation, asked, form, lambda reason: asked.admin.remove_job(name, reason=reason))
