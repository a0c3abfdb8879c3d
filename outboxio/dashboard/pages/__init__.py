"""The pages and actions of the dashboard. Each page is a line in ``PAGES``."""

from __future__ import annotations

from outboxio.dashboard.lists import LONG
from outboxio.dashboard.pages import bulk_operations
from outboxio.dashboard.pages.cluster import glossary, instances, jobs, keys, shards
from outboxio.dashboard.pages.declared import declared_actions
from outboxio.dashboard.pages.event_types import all_event_types, event_type
from outboxio.dashboard.pages.events import action, actions, event, events, payload
from outboxio.dashboard.pages.handlers import handler, handlers
from outboxio.dashboard.pages.notifications import dead, notifications
from outboxio.dashboard.pages.operations import operation, operations
from outboxio.dashboard.pages.overview import overview
from outboxio.dashboard.pages.search import search
from outboxio.dashboard.pages.webhooks import webhooks
from outboxio.dashboard.view import FormAction, Route

PAGES: list[Route] = [
    Route("overview", "/", overview, patience=6.0),
    Route("handlers", "/handlers", handlers),
    Route("handler", "/handlers/{name:path}", handler, patience=LONG),
    Route("jobs", "/jobs", jobs),
    Route("dead", "/dead", dead, patience=LONG),
    Route("notifications", "/notifications", notifications, patience=LONG),
    Route("events", "/events", events),
    Route("event", "/events/{id}", event),
    Route("payload", "/events/{id}/payload", payload, "payloads"),
    Route("event_types", "/event-types", all_event_types, patience=LONG),
    Route("event_type", "/event-types/{name:path}", event_type, patience=LONG),
    Route("actions", "/actions", actions),
    Route("action", "/actions/{id}", action),
    Route("search", "/search", search, patience=LONG),
    Route("keys", "/keys", keys),
    Route("webhooks", "/webhooks", webhooks, patience=LONG),
    Route("instances", "/instances", instances),
    Route("shards", "/shards", shards),
    Route("operations", "/operations", operations),
    Route("operation", "/operations/{id}", operation),
    Route("glossary", "/glossary", glossary),
]

FORM_ACTIONS: list[FormAction] = [
    FormAction("retry", "/operations/retry", bulk_operations.retry, "retry"),
    FormAction("skip", "/operations/skip", bulk_operations.skip, "skip"),
    *declared_actions(),
]
