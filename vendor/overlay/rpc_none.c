/* A build without the RPC back end: no worker, so none is ever lost. */

int dflash_rpc_failures(void);
void dflash_rpc_timeout(int seconds);

int dflash_rpc_failures(void) {
    return 0;
}

void dflash_rpc_timeout(int seconds) {
    (void) seconds;
}
