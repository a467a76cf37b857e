"""Live windows and running leases of a key or a team, as the quota store has them now."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from meter.admin.deps import AdminDeps
from meter.admin.reading import key_and_tier, terms_named
from meter.callers.book import bind, team_in_force
from meter.callers.stored import Known
from quotas.store import Account, LeaseView, Scope, View, Window


async def view_of_key(deps: AdminDeps, key_id: str) -> dict[str, Any]:
    """The windows of the key and of its team, with the limits that are in force here; raises NotFound."""
    account = await _account(deps, key_id)
    view = await deps.store.peek(account)
    return _shown(view, view.windows, (lease for lease in view.leases if lease.key == key_id))


async def view_of_team(deps: AdminDeps, name: str) -> dict[str, Any]:
    """The team's windows, and the leases of all its keys; raises NotFound."""
    terms = await terms_named(deps, "team", name)
    policy = team_in_force(terms.policy)[0].policy
    view = await deps.store.peek(Account(f"team:{name}", (Scope("team", name, policy),)))
    return _shown(view, view.windows, view.leases)


async def _account(deps: AdminDeps, key_id: str) -> Account:
    """As this process has it; of a key that was made a moment ago, as it will have it."""
    if caller := deps.directory.by_key(key_id):
        return caller.account
    key, tier = await key_and_tier(deps, key_id)
    teams = {key.team: await terms_named(deps, "team", key.team)} if key.team else {}
    return bind(Known(keys={key.id: key}, tiers={tier.name: tier}, teams=teams)).entries[key.id].caller.account


def _shown(view: View, windows: Iterable[Window], leases: Iterable[LeaseView]) -> dict[str, Any]:
    return {"windows": list(windows), "leases": [_lease(lease) for lease in leases]}


def _lease(lease: LeaseView) -> dict[str, Any]:
    return {
        "request_id": lease.lease,
        "key_id": lease.key,
        "route": lease.route,
        "held": lease.held,
        "charged": lease.charged,
        "age_seconds": lease.age_seconds,
    }
