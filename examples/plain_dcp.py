"""Open a checkpoint with PyTorch alone: `python examples/plain_dcp.py CHECKPOINT FILE`.

Writes everything that ``torch.distributed.checkpoint`` finds in it to one ``torch.save`` file.
"""

import sys

from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

if __name__ == "__main__":
    dcp_to_torch_save(sys.argv[1], sys.argv[2])
    if any(name.split(".")[0] == "dcp_pipeline" for name in sys.modules):
        sys.exit("dcp_pipeline was imported: this is not plain torch.distributed.checkpoint")
