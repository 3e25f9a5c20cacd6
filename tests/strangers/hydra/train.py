import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from loop import fit


@hydra.main(version_base=None, config_path="conf", config_name="config")
def main(config):
    numbers = torch.randn(config.data.rows, 4, generator=torch.Generator().manual_seed(0))
    fit(numbers, HydraConfig.get().runtime.output_dir)


if __name__ == "__main__":
    main()
