"""A dry run of outer steps of replicas that train by themselves: which exchanges there are in each, in bytes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from terrazzo.engine.buckets.unit_layout import UnitLayout
from terrazzo.engine.comm.transfer import Transfer
from terrazzo.engine.dry_run.counting import CountingBucket, StepCounts
from terrazzo.engine.instrumentation.tally import Tally
from terrazzo.engine.plan.bucket_spec import BucketSpec
from terrazzo.engine.plan.diloco import DiLoCo
from terrazzo.engine.replicas.outer_exchange import dry_run_exchange, exchange_bytes
from terrazzo.engine.replicas.outer_weights import dry_run_set_master
from terrazzo.engine.replicas.rounds import dry_run_compare

__all__ = ["dry_run_fragments", "dry_run_outer_step", "under_way_bytes"]


def dry_run_outer_step(units: Sequence[UnitLayout]) -> Tally:
    """Transient memory and traffic on this rank of the outer step that ends a round, and of what replicas compare as
    one begins. Nothing where there is none.

    Args:
        units: all of the model; a `UnitLayout` of each is enough.
    """
    tally, trained = Tally(), _trained(units)
    if trained:
        axes, specs = units[0].buckets[0].axes, list(chain(*trained))
        dry_run_compare(axes, tally)
        for numel in _settings(trained).messages(_numel(specs)):
            dry_run_exchange(_settings(trained), numel, axes, tally)
        _set_masters(specs, tally)
    return tally


def dry_run_fragments(units: Sequence[UnitLayout]) -> list[Tally]:
    """The same of each outer step within a round; none where replicas do not stream."""
    tallies, trained = list[Tally](), _trained(units)
    for specs in _fragments(trained):
        tallies.append(Tally())
        if numel := _numel(specs):
            dry_run_exchange(_settings(trained), numel, units[0].buckets[0].axes, tallies[-1])
        _set_masters(specs, tallies[-1])
    return tallies


def under_way_bytes(units: Sequence[UnitLayout]) -> int:
    """The most memory that an exchange has which is under way while steps are taken; also that of a replica alone,
    whose outer gradients are ready at once and wait as long.
    """
    trained, axes = _trained(units), units[0].buckets[0].axes
    if not trained or not _settings(trained).delay:
        return 0
    return max(exchange_bytes(_settings(trained), _numel(specs), axes) for specs in _fragments(trained))


def _trained(units: Sequence[UnitLayout]) -> list[list[BucketSpec]]:
    """What outer steps are taken of, by unit."""
    by_unit = ([bucket.spec for bucket in unit.buckets if bucket.spec.outer_states] for unit in units)
    return [specs for specs in by_unit if specs]


def _settings(trained: Sequence[Sequence[BucketSpec]]) -> DiLoCo:
    settings = trained[0][0].diloco
    assert settings is not None, "an outer step has settings"
    return settings


def _fragments(trained: Sequence[Sequence[BucketSpec]]) -> list[list[BucketSpec]]:
    if not trained or not _settings(trained).streams:
        return []
    return [list(chain(*part)) for part in _settings(trained).cut(trained)]


def _numel(specs: Sequence[BucketSpec]) -> int:
    return sum(spec.numel(spec.outer_axes) for spec in specs)


def _set_masters(specs: Sequence[BucketSpec], tally: Tally) -> None:
    for spec in specs:
        dry_run_set_master(spec, tally)
        Transfer(CountingBucket(spec, StepCounts(tally.traffic, tally.ledger, None)).publish()).finish()
