/*
 * overlay.h: what vendor/ adds to ggml. Both a C header (pool_trim.cu, pool_none.c) and declarations for
 * cffi, so it includes nothing: ggml-backend.h comes before it.
 */

struct dflash_pool_stats {
    size_t live_bytes;   /* legacy pools: handed out to running operations */
    size_t cached_bytes; /* legacy pools: kept for later, what a trim gives back */
    size_t vmm_bytes;    /* virtual-memory pools: mapped, given back only with the backend */
    int n_blocks;        /* blocks behind cached_bytes */
    int n_pools;         /* pools in use, of either kind */
    int n_legacy_pools;  /* those of them that a trim can empty */
    int n_graphs;        /* captured graphs that replay */
    int n_ranks;         /* CUDA or HIP backends visited: 1, those of a meta backend, 0 for others */
};

/* What a trim answers instead of bytes, as (size_t): negative when read as ptrdiff_t. */
enum dflash_trim_failure {
    DFLASH_TRIM_CAPTURING = -1, /* a stream is recording a graph: nothing was changed */
    DFLASH_TRIM_FAILED = -2     /* waiting for a stream failed: the device is lost */
};

/* True once the backend, or any rank of a meta backend, has made a legacy pool. */
bool ggml_backend_cuda_has_legacy_pool(ggml_backend_t backend);

/* Bytes given back to the driver; 0, without waiting, where there is no legacy pool. A rank of a meta
   backend that fails does not stop the others; the answer is then its failure. */
size_t ggml_backend_cuda_trim_pool(ggml_backend_t backend);

/* Fills stats with sums over all ranks, zeros for other backends. Waits for nothing. */
void ggml_backend_cuda_pool_stats(ggml_backend_t backend, struct dflash_pool_stats *stats);

/* How often a worker behind ggml's RPC back end did not answer, in this process. Whoever sees the number grow
   asks its devices whether they still have memory: one that is lost answers zeros to everything. */
int dflash_rpc_failures(void);

/* Seconds that connections to workers wait for an answer, of those that the calling thread makes from now on; 0:
   any time. */
void dflash_rpc_timeout(int seconds);
