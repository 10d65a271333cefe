"""The faults of `make mutations`, which `tools.mutations` puts in: one line each, folder by folder."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["MUTATIONS", "Mutation"]


class Mutation(NamedTuple):
    """`old`, which is in `file` below `src/terrazzo` exactly once, becomes `new`; `tests` should find it."""

    breaks: str
    file: str
    old: str
    new: str
    tests: str


MUTATIONS = [
    # -- schedule and bucket
    Mutation(
        "backward reads weights that are still on their way",
        "engine/schedule/backward.py",
        "self._straying.ask_for(unit, self)\n        unit.weights.wait()",
        "self._straying.ask_for(unit, self)",
        "engine/test_parity_processes.py",
    ),
    Mutation(
        "one unit less is prefetched in backward",
        "engine/schedule/backward.py",
        "order.backward[step + 1 : step + 1 + self._weights.prefetch]",
        "order.backward[step + 1 : step + self._weights.prefetch]",
        "planner/test_memory_engine.py",
    ),
    Mutation(
        "what is kept until backward is a view of memory that goes",
        "engine/buckets/weights/weight_gathers.py",
        "Buffer(part.space, part.axes, part.data.clone())",
        "Buffer(part.space, part.axes, part.data)",
        "engine/test_parity.py",
    ),
    # -- gradients and their sums
    Mutation(
        "an earlier micro-batch is overwritten",
        "engine/buckets/gradients/unreduced.py",
        "target.add_(grad)",
        "target.copy_(grad)",
        "engine/test_parity.py",
    ),
    Mutation(
        "gradients of norms are not summed over tp",
        "engine/mesh/family.py",
        '(("tp",) if self is Family.SHARED else ())',
        "()",
        "parallel/test_tensor.py",
    ),
    Mutation(
        "what all tp ranks compute alike is counted for each of them",
        "engine/buckets/resting/counted_once.py",
        "not member.replicated or",
        "member.replicated or",
        "parallel/test_tensor.py",
    ),
    Mutation(
        "the total norm counts what tp ranks share more than once",
        "engine/buckets/resting/counted_once.py",
        "rest = self.spec.ranks if self.space.axes.has_experts else seeing_same_data(self.spec.ranks)",
        "rest = self.spec.ranks if self.space.axes.has_experts else ()",
        "parallel/test_tensor.py",
    ),
    Mutation(
        "the total norm counts what copies of experts share more than once",
        "engine/buckets/resting/counted_once.py",
        "rest = self.spec.ranks if self.space.axes.has_experts else seeing_same_data(self.spec.ranks)",
        "rest = seeing_same_data(self.spec.ranks)",
        "parallel/test_expert_training.py",
    ),
    Mutation(
        "ranks with other experts add up their gradients",
        "engine/mesh/family.py",
        '"edp" if self is Family.EXPERT',
        '"dp_shard" if self is Family.EXPERT',
        "parallel/test_expert_training.py",
    ),
    Mutation(
        "rows of one expert are not in the order of the ranks that they are from",
        "parallel/expert/row_order.py",
        "expert.argsort(stable=True)",
        "expert.argsort(stable=True, descending=True)",
        "parallel/test_expert.py",
    ),
    Mutation(
        "a rank does not say that it has come to the end of a forward",
        "engine/hooks/forward_hooks.py",
        "self._exchanges.before_end(forward.end_label)",
        "pass",
        "parallel/test_expert.py",
    ),
    Mutation(
        "recomputation counts rows again",
        "train/model/experts.py",
        "if not inside_backward():",
        "if True:",
        "parallel/test_expert_training.py",
    ),
    Mutation(
        "padding between parameters is not zeroed",
        "engine/buckets/gradients/unreduced.py",
        "data[gap.start : gap.stop].zero_()",
        "pass",
        "engine/test_numerics.py engine/test_unused.py",
    ),
    Mutation(
        "a parameter without a gradient counts as what its memory held",
        "engine/buckets/gradients/unreduced.py",
        "self.data[slot.range.start : slot.range.stop].zero_()",
        "pass",
        "engine/test_unused.py",
    ),
    Mutation(
        "clipping scales what a later backward brings, too",
        "engine/buckets/gradients/finished.py",
        "        if earlier is not None:\n            earlier.apply_factor()",
        "        if earlier is not None:",
        "engine/test_numerics.py engine/offload/test_bits.py",
    ),
    Mutation(
        "an edit in 16 bits rounds the master weights that it leaves alone",
        "engine/buckets/resting/buffer.py",
        "torch.where(as_seen(values).to(value.dtype) == value, values, value.to(values.dtype))",
        "value.to(values.dtype)",
        "engine/test_at_rest.py",
    ),
    Mutation(
        "a sum is rounded to the dtype that it was sent in",
        "engine/buckets/gradients/gradient.py",
        ".reduce_scatter(data.to(wire), dtype)",
        ".reduce_scatter(data.to(wire), wire)",
        "engine/test_numerics.py",
    ),
    Mutation(
        "a mean is taken along each axis",
        "engine/buckets/gradients/gradient.py",
        "divisor.product if move.divides else 1",
        "divisor.product",
        "engine/test_error_feedback.py",
    ),
    Mutation(
        "terms of a sum come in another order",
        "engine/comm/sums.py",
        "for part in parts[1:-1]:",
        "for part in reversed(parts[1:-1]):",
        "engine/test_parity.py",
    ),
    # -- collectives
    Mutation(
        "memory is used again while a neighbour reads it",
        "engine/comm/host/gloo.py",
        "                neighbour.await_taken(kind, label)",
        "                pass",
        "engine/comm",
    ),
    Mutation(
        "the last element of a sum is left out",
        "engine/comm/host/gloo.py",
        "for start in range(0, total.numel(), step):",
        "for start in range(0, total.numel() - 1, step):",
        "engine/comm",
    ),
    # -- optimizers
    Mutation(
        "memory is given back while it is sent to another machine",
        "engine/comm/host/gloo.py",
        "            for work in going:\n                work.wait()",
        "            pass",
        "engine/comm engine/test_processes.py",
    ),
    Mutation(
        "the norm counts a tied weight on each stage that has it",
        "engine/optim/clipping.py",
        "for bucket in finished if bucket.counted.here)",
        "for bucket in finished)",
        "parallel/test_pipeline_tied.py",
    ),
    Mutation(
        "small gradients are scaled up by clipping",
        "engine/optim/clipping.py",
        "(max_norm / (total + 1e-6)).clamp(max=1.0)",
        "max_norm / (total + 1e-6)",
        "engine/test_numerics.py",
    ),
    Mutation(
        "the loss scale grows though steps overflowed between",
        "engine/progress/loss_scale.py",
        "self.skipped_steps += 1\n        self._good_steps = 0",
        "self.skipped_steps += 1",
        "engine/test_fp16.py",
    ),
    # -- offload
    Mutation(
        "an update that is under way sees a rate set later",
        "engine/optim/stock/settings.py",
        "return value.clone()",
        "return value",
        "engine/offload/test_bits.py engine/offload/test_modes.py",
    ),
    Mutation(
        "a staging buffer is filled while it is written to a file",
        "engine/offload/updater.py",
        "self._ring.append(staging)\n        staging.finish_writing()",
        "self._ring.append(staging)",
        "engine/offload/test_bits.py engine/offload/test_swap_faults.py",
    ),
    Mutation(
        "a cell is read while an earlier write of it is under way",
        "engine/offload/updater.py",
        "            if staging.holds(task.bucket, task.window):\n                staging.finish_writing()",
        "            pass",
        "engine/offload/test_swap_faults.py engine/offload/test_bits.py",
    ),
    Mutation(
        "weights are gathered from a file that is being written",
        "engine/offload/updater.py",
        "                self._finish_weights(task.bucket)",
        "                pass",
        "engine/offload/test_bits.py",
    ),
    Mutation(
        "a block goes to the start of its stripe",
        "engine/offload/nvme/swap_space.py",
        "stripe * size + inside, at",
        "stripe * size, at",
        "engine/offload/test_swap_space.py",
    ),
    # -- checkpoints
    Mutation(
        "a file is not flushed",
        "checkpoint/storage/local.py",
        "os.fsync(self._descriptor)",
        "pass",
        "checkpoint/test_power_loss.py",
    ),
    Mutation(
        "a folder is renamed before its names are flushed",
        "checkpoint/storage/local.py",
        "        sync_folder(self.path)\n        if",
        "        if",
        "checkpoint/test_power_loss.py",
    ),
    Mutation(
        "a block counts as written whatever is read back",
        "checkpoint/storage/rank_file.py",
        "return digest(buffer) == expected",
        "return True",
        "checkpoint/test_damage.py",
    ),
    Mutation(
        "only a part of the blocks is checked on loading",
        "checkpoint/loading/terrazzo_checkpoint.py",
        "for block in shares[part]:",
        "for block in shares[0]:",
        "checkpoint/test_damage.py",
    ),
    Mutation(
        "weights on other ranks stay as they were after loading",
        "engine/states/model_state.py",
        "        self._engine.publish()\n",
        "",
        "checkpoint/test_save_load.py",
    ),
    # -- dialects
    Mutation(
        "a default of DeepSpeed's is wrong",
        "dialects/formats/deepspeed/keys_zero.py",
        '"stage3_param_persistence_threshold": Key(integer(), 100_000,',
        '"stage3_param_persistence_threshold": Key(integer(), 10_000,',
        "dialects/test_deepspeed.py",
    ),
    Mutation(
        "Adam's betas are swapped",
        "dialects/formats/trainer/read_loop.py",
        "derived((first.value, second.value)",
        "derived((second.value, first.value)",
        "dialects/test_trainer.py",
    ),
    Mutation(
        "replicas on CPUs are written as replicas on GPUs",
        "dialects/formats/accelerate/write.py",
        '"MULTI_CPU" if draft.value("training.device") == "cpu" else "MULTI_GPU"',
        '"MULTI_GPU"',
        "dialects/test_accelerate_write.py",
    ),
    Mutation(
        "weights that are split in a way without a name are whole under DeepSpeed",
        "dialects/formats/deepspeed/write_zero.py",
        '3 if axes["weight"] != "-" else 2 if axes["grad"]',
        '2 if axes["grad"]',
        "dialects/test_deepspeed_write.py",
    ),
    Mutation(
        "a model in 16 bits alone is no mixed precision under DeepSpeed",
        "dialects/formats/accelerate/write.py",
        'if pure and engine != "DEEPSPEED":',
        "if pure:",
        "dialects/test_accelerate_write.py",
    ),
    # -- planner
    Mutation(
        "moments are billed for padding, too",
        "planner/layout/buckets.py",
        "return min(self.end, self.numel(self.optim_axes))",
        "return self.numel(self.optim_axes)",
        "planner/test_memory_engine.py",
    ),
    Mutation(
        "a sum that replaces its terms is billed beside them",
        "engine/plan/bucket_spec.py",
        "self.precision.accumulate.itemsize if partial and finish else 0",
        "self.precision.accumulate.itemsize",
        "engine/test_memory.py planner/test_engine_truth.py",
    ),
    # -- training
    Mutation(
        "the first step of a warm-up learns nothing",
        "train/settings/optimizer.py",
        "return (step + 1) / config.warmup_steps",
        "return step / config.warmup_steps",
        "train/test_schedule.py",
    ),
    Mutation(
        "the reported loss is that of the last micro-batch",
        "parallel/pipeline/step.py",
        "total = total + loss.detach()",
        "total = loss.detach()",
        "train/test_sft.py",
    ),
    Mutation(
        "DPO forgets its reference",
        "train/model/objectives.py",
        "(own - batch.reference.to(own.device, non_blocking=True))",
        "own",
        "train/test_preferences.py",
    ),
    Mutation(
        "a score is read at the last token but one",
        "train/model/objectives.py",
        "torch.arange(1, batch.targets.shape[1] + 1)",
        "torch.arange(batch.targets.shape[1])",
        "train/test_preferences.py",
    ),
    Mutation(
        "positions run on over the documents in a sequence",
        "train/data/sequences.py",
        "tokens - np.maximum(self.offsets[document], start)",
        "tokens - start",
        "train/test_documents_apart.py",
    ),
    Mutation(
        "a prompt has one token of its answer",
        "train/data/sequences.py",
        "first - starts + 1, 0)",
        "first - starts + 2, 0)",
        "train/test_prompts.py",
    ),
    Mutation(
        "ranks share out a step's samples by micro-batch first",
        "train/data/loader.py",
        "share.reshape(self.readers, -1, self.batch.micro_batch)[reader]",
        "share.reshape(-1, self.readers, self.batch.micro_batch)[:, reader]",
        "train/test_data_loader.py",
    ),
    Mutation(
        "a step that was read ahead is trained on after resuming",
        "train/data/loader.py",
        "self.ahead, self.cursor = None, Cursor(",
        "self.cursor = Cursor(",
        "train/test_data_loader.py",
    ),
    Mutation(
        "a machine that is told to go stops those that stay",
        "launch/rank/rank_process.py",
        "if code == PREEMPTED and self.asked:",
        "if code == PREEMPTED:",
        "launch/test_failure.py",
    ),
]
