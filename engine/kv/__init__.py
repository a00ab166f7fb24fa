"""Which KV blocks a sequence uses. Public face: BlockTables for the scheduler, on a BlockPool and HostBlocks."""
