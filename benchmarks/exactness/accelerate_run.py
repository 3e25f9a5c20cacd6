"""A minimal Hugging Face Accelerate script that is cut and resumed by Accelerate's own means. Runs once per rank.

Variants: `plain` is the default sampler and `skip_first_batches`. `seedable` has `use_seedable_sampler` as well.
`stateful` has `use_stateful_dataloader` instead of skipping. `stateful-seedable` has both. `by-hand` is that with what
a user can write: a dataset that remembers its generator, and the global one restored after the first batch.
"""

import common
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.nn import functional
from torch.utils.data import DataLoader

_CONFIGURATIONS = {
    "plain": DataLoaderConfiguration(),
    "seedable": DataLoaderConfiguration(use_seedable_sampler=True),
    "stateful": DataLoaderConfiguration(use_stateful_dataloader=True),
    "stateful-seedable": DataLoaderConfiguration(use_stateful_dataloader=True, use_seedable_sampler=True),
    "by-hand": DataLoaderConfiguration(use_stateful_dataloader=True, use_seedable_sampler=True),
}


def main(args: common.Arguments) -> None:
    """Train to the end or to the cut."""
    set_seed(common.SEED, deterministic=True)
    configuration = _CONFIGURATIONS[args.variant]
    accelerator = Accelerator(cpu=True, dataloader_config=configuration)
    dataset = (common.RememberingImages if args.variant == "by-hand" else common.Images)(
        args.data, augment=args.randomness
    )
    ranks = accelerator.num_processes
    loader = DataLoader(dataset, batch_size=common.GLOBAL_BATCH // ranks, shuffle=True, num_workers=args.workers)
    model = common.build_model(dropout=args.randomness)
    optimizer, schedule = common.build_optimizer(
        model, common.EPOCHS * len(loader)
    )  # prepared, it steps once for each rank
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    trace, step = common.Trace(), args.resume or 0
    if step:
        accelerator.load_state(str(args.checkpoints / f"step_{step}"))
    restored = torch.get_rng_state()
    first_epoch, skip = divmod(step, len(loader))
    for epoch in range(first_epoch, common.EPOCHS):
        model.train()
        loader.set_epoch(epoch)
        skips = epoch == first_epoch and skip and not configuration.use_stateful_dataloader
        for images, labels in accelerator.skip_first_batches(loader, skip) if skips else loader:
            if args.variant == "by-hand" and step == args.resume:
                torch.set_rng_state(restored)
            trace.note(step, images, labels)
            accelerator.backward(functional.cross_entropy(model(images), labels))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            step += 1
            if step % common.CHECKPOINT_EVERY == 0:
                accelerator.save_state(str(args.checkpoints / f"step_{step}"))
                accelerator.wait_for_everyone()
            if step == args.until:
                common.die()
    if accelerator.is_main_process:
        common.write_result(args, accelerator.unwrap_model(model), optimizer, trace)
    accelerator.end_training()


if __name__ == "__main__":
    main(common.arguments())
