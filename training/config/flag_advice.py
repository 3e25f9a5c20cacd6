"""Flags that users of other trainers type, and our former ones, each with what to type here. Pure.

The names are those of torchvision's references, timm, Lightning, Accelerate, Hugging Face, torchrun and sbatch.
"""

from collections.abc import Collection, Sequence

from hpc.core.errors import UserError

# what to type: the names that others have for it
_NAMES: dict[str, str] = {
    "--data": "data-dir data-path data-root dataset dataset-dir root train-dir",
    "--model": "arch architecture backbone model-name net network",
    "--weights with a file or a name such as IMAGENET1K_V1": (
        "pretrained initial-checkpoint init-weights pretrained-weights pretrained-path from-pretrained finetune"
    ),
    "--freeze-backbone": "freeze freeze-encoder linear-probe",
    "--epochs": "max-epochs num-epochs num-train-epochs n-epochs total-epochs",
    "--batch-size, the images of all ranks together": (
        "batch b bs global-batch-size per-device-train-batch-size per-gpu-batch-size train-batch-size micro-batch-size"
    ),
    "--lr": "learning-rate base-lr blr init-lr max-lr peak-lr",
    "--lr-scaling": "auto-scale-lr lr-base-scale lr-scale scale-lr",
    "--lr-scheduler": "sched scheduler schedule lr-schedule lr-scheduler-type lr-policy lr-sched",
    "--lr-step-epochs": (
        "decay-epochs decay-milestones drop-epochs lr-milestones lr-step-size lr-steps milestones step-size"
    ),
    "--lr-gamma": "decay-rate drop-factor gamma lr-decay lr-decay-rate",
    "--plateau-patience": "lr-patience patience-epochs",
    "--early-stopping-patience": "early-stopping early-stop patience",
    "--warmup-epochs": "lr-warmup-epochs num-warmup-epochs warmup warmup-steps",
    "--optimizer": "opt optim optimiser",
    "--optimizer sgd --nesterov": "sgd-nesterov",
    "--momentum": "adam-beta1 beta1 sgd-momentum",
    "--weight-decay": "decay l2 wd",
    "--decay-norm-and-bias": "bias-weight-decay decay-all norm-weight-decay",
    "--label-smoothing": "label-smoothing-factor smoothing",
    "--clip-grad-norm": "clip-grad clip-norm grad-clip gradient-clip-norm gradient-clip-val max-grad-norm",
    "--grad-accum-steps": (
        "accumulate accumulate-grad-batches accumulation-steps grad-accum gradient-accumulation-steps"
    ),
    "--ema-decay 0.999": "ema model-ema model-ema-decay use-ema",
    "--sync-bn": "sync-batchnorm sync-batch-norm syncbn",
    "--amp bf16 or --amp fp16": (
        "precision mixed-precision amp-dtype autocast bf16 fp16 half use-amp native-amp apex-amp no-amp"
    ),
    "--strategy": "accelerator-strategy distributed-strategy fsdp use-fsdp zero",
    "--memory-format channels-last": "channels-last",
    "--compile": "torch-compile torchcompile",
    "--compress-gradients bf16": "compress-grads gradient-compression",
    "--deterministic": "cudnn-deterministic use-deterministic-algorithms",
    "--crop": "random-crop random-resized-crop",
    "--flip": "hflip horizontal-flip no-hflip",
    "--auto-augment": "aa augmentation autoaugment auto-augment-policy policy ra randaugment trivial-augment",
    "--random-erasing": "random-erase random-erasing-prob reprob",
    "--mixup": "mixup-alpha",
    "--cutmix": "cutmix-alpha",
    "--seed": "manual-seed random-seed seed-everything",
    "--image-size": "crop-size img-size input-size resolution train-crop-size",
    "--eval-image-size": "eval-size test-input-size val-crop-size val-resize-size",
    "--val-split": "holdout val-fraction val-size validation-fraction validation-split",
    "--max-corrupt-images": "max-corrupt",
    "--num-workers": "dataloader-num-workers j loader-workers num-data-workers workers",
    "--data-on-device on": "cache-dataset data-on-gpu hold-on-gpu",
    "--log-every": "log-every-n-steps log-interval log-steps logging-steps print-freq",
    "--checkpoint-every": "checkpoint-interval every-n-train-steps save-every save-freq save-steps",
    "--keep-checkpoints": "checkpoint-hist keep-last save-top-k save-total-limit",
    "--max-hours": "max-time train-time",
    "--config": "cfg config-file yaml",
    "--runs-dir and --name of hpc submit, or --run-dir of python -m training": (
        "default-root-dir exp-dir log-dir logdir output output-dir save-dir work-dir"
    ),
    "--name of hpc submit": "exp-name experiment experiment-name job-name run-name",
    "--nodes of hpc submit": "nnodes num-machines num-nodes",
    "--gpus-per-node of hpc submit, or torchrun --nproc-per-node": (
        "devices gpus gres n-gpus ngpus nproc-per-node nproc num-gpus num-processes gpus-per-task ntasks-per-node "
        "world-size"
    ),
    "--cpus-per-gpu of hpc submit": "cpus cpus-per-task c",
    "--mem of hpc submit": "memory mem-per-cpu mem-per-gpu",
    "--time of hpc submit": "time-limit timeout walltime",
    "--partition of hpc submit": "p queue",
    "--exclude of hpc submit": "exclude-nodes x",
}
# Flags that nobody needs here.
_NEEDLESS: dict[str, str] = {
    "leave it out: a run resumes from its newest checkpoint by itself (to begin from a file, use --weights)": (
        "auto-resume ckpt-path continue resume resume-from resume-from-checkpoint start-epoch"
    ),
    "leave it out: the classes are the directories of --data": "nb-classes num-classes",
    "leave it out: each node and rank is found through --nodes of hpc submit, or torchrun": (
        "dist-backend dist-url distributed local-rank master-addr master-port node-rank rank"
    ),
}
ADVICE: dict[str, str] = {
    name.replace("_", "-"): advice
    for table, words in ((_NAMES, "use "), (_NEEDLESS, ""))
    for text, names in table.items()
    for advice in [words + text]
    for name in names.split()
}


def check_names(arguments: Sequence[str], known: Collection[str]) -> None:
    """Refuse flags of a command line that have another name here.

    Args:
        arguments: the command line.
        known: flags that exist, without dashes.

    Raises:
        UserError: says which flag to type.
    """
    for argument in arguments:
        typed = argument.partition("=")[0]
        name = typed.lstrip("-").replace("_", "-")
        if typed.startswith("-") and name not in known and (advice := advice_for(name, known)):
            raise UserError(f"there is no flag {typed}: {advice}")


def advice_for(name: str, known: Collection[str]) -> str | None:
    """What to type instead of a flag; None: nothing that this program takes."""
    advice = ADVICE.get(name, "")
    # A script of the user's own has flags of its own.
    is_for_training = "hpc submit" not in advice and advice != "use --config"
    return None if not advice or (is_for_training and "lr" not in known) else advice
