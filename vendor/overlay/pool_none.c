/* Builds without CUDA or HIP: no backend has a pool, so nothing is ever trimmed. */

#include "ggml-backend.h"
#include "cdef/overlay.h"

#include <string.h>

bool ggml_backend_cuda_has_legacy_pool(ggml_backend_t backend) {
    (void) backend;
    return false;
}

size_t ggml_backend_cuda_trim_pool(ggml_backend_t backend) {
    (void) backend;
    return 0;
}

void ggml_backend_cuda_pool_stats(ggml_backend_t backend, struct dflash_pool_stats *stats) {
    (void) backend;
    memset(stats, 0, sizeof(*stats));
}
