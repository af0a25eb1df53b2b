/* A build without the RPC back end: no worker, so none is ever lost. */

int dflash_rpc_failures(void);

int dflash_rpc_failures(void) {
    return 0;
}
