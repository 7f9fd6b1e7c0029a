"""`python -m dcp_pipeline` is the command `dcp-pipeline`."""

from dcp_pipeline.cli.main import main

if __name__ == "__main__":
    main()
