// Compiled in place of ggml-cuda.cu, which it includes: the legacy pool is private to that file.
// Adds what cdef/overlay.h declares. A ggml change that matters here breaks the compile.

#include "ggml-cuda.cu"

extern "C" {
#include "cdef/overlay.h"
}

#if defined(GGML_USE_HIP) && !defined(cudaStreamIsCapturing)
#define cudaStreamIsCapturing hipStreamIsCapturing
#define cudaStreamCaptureStatus hipStreamCaptureStatus
#define cudaStreamCaptureStatusNone hipStreamCaptureStatusNone
#endif

namespace {

struct device_guard {
    int device = 0;
    device_guard() { CUDA_CHECK(cudaGetDevice(&device)); }
    ~device_guard() { CUDA_CHECK(cudaSetDevice(device)); }
};

template <typename Visit> void for_each_rank(ggml_backend_t backend, Visit visit) {
    if (backend == nullptr) {
        return;
    }
    if (ggml_backend_is_meta(backend)) {
        for (size_t i = 0; i < ggml_backend_meta_n_backends(backend); ++i) {
            for_each_rank(ggml_backend_meta_simple_backend(backend, i), visit);
        }
    } else if (ggml_backend_is_cuda(backend)) {
        visit(*static_cast<ggml_backend_cuda_context *>(backend->context));
    }
}

template <typename Visit> void for_each_pool(ggml_backend_cuda_context & ctx, Visit visit) {
    for (auto & row : ctx.pools) {
        for (auto & pool : row) {
            if (pool) {
                visit(*pool);
            }
        }
    }
}

std::vector<ggml_cuda_pool_leg *> legacy_pools(ggml_backend_cuda_context & ctx) {
    std::vector<ggml_cuda_pool_leg *> pools;
    for_each_pool(ctx, [&](ggml_cuda_pool & pool) {
        if (auto * legacy = dynamic_cast<ggml_cuda_pool_leg *>(&pool)) {
            pools.push_back(legacy);
        }
    });
    return pools;
}

// Calls `visit` for every stream the context has made, not only the current one, until one returns false.
template <typename Visit> bool all_streams(ggml_backend_cuda_context & ctx, Visit visit) {
    for (int device = 0; device < GGML_CUDA_MAX_DEVICES; ++device) {
        for (cudaStream_t stream : ctx.streams[device]) {
            if (stream != nullptr) {
                ggml_cuda_set_device(device);
                if (!visit(stream)) {
                    return false;
                }
            }
        }
    }
    return true;
}

size_t trim(ggml_backend_cuda_context & ctx) {
    const auto pools = legacy_pools(ctx);
    if (pools.empty()) {
        return 0; // no wait and no lost graphs on virtual-memory pools
    }
    device_guard guard;
    const bool idle = all_streams(ctx, [](cudaStream_t stream) {
        cudaStreamCaptureStatus status;
        return cudaStreamIsCapturing(stream, &status) == cudaSuccess && status == cudaStreamCaptureStatusNone;
    });
    if (!idle) {
        return (size_t) DFLASH_TRIM_CAPTURING;
    }

    // Freeing memory can invalidate a capture that another context of this process has under way; ggml
    // guards its own teardown with the same lock.
    std::unique_lock<std::mutex> lock(ggml_cuda_lock);
    ggml_cuda_lock_cv.wait(lock, [] { return ggml_cuda_lock_counter.load(std::memory_order_relaxed) == 0; });

    if (!all_streams(ctx, [](cudaStream_t stream) { return cudaStreamSynchronize(stream) == cudaSuccess; })) {
        return (size_t) DFLASH_TRIM_FAILED;
    }
#ifdef USE_CUDA_GRAPH
    ctx.cuda_graphs.clear(); // they have the addresses of pool blocks in them, so they go first
#endif
    size_t released = 0;
    for (ggml_cuda_pool_leg * pool : pools) {
        const size_t before = pool->pool_size; // live + cached
        pool->clear_pool();
        released += before - pool->pool_size;
    }
    return released;
}

void add_stats(ggml_backend_cuda_context & ctx, dflash_pool_stats & stats) {
    ++stats.n_ranks;
    for_each_pool(ctx, [&](ggml_cuda_pool & pool) {
        ++stats.n_pools;
        if (const auto * legacy = dynamic_cast<ggml_cuda_pool_leg *>(&pool)) {
            ++stats.n_legacy_pools;
            size_t cached = 0;
            for (const auto & block : legacy->buffer_pool) {
                stats.n_blocks += block.ptr != nullptr;
                cached += block.size;
            }
            stats.cached_bytes += cached;
            stats.live_bytes += legacy->pool_size - cached;
        }
#if defined(GGML_USE_VMM)
        if (const auto * vmm = dynamic_cast<ggml_cuda_pool_vmm *>(&pool)) {
            stats.vmm_bytes += vmm->pool_size;
        }
#endif
    });
#ifdef USE_CUDA_GRAPH
    for (const auto & entry : ctx.cuda_graphs) {
        stats.n_graphs += entry.second && entry.second->instance != nullptr;
    }
#endif
}

} // namespace

extern "C" {

GGML_BACKEND_API bool ggml_backend_cuda_has_legacy_pool(ggml_backend_t backend) {
    bool found = false;
    for_each_rank(backend, [&](ggml_backend_cuda_context & ctx) { found = found || !legacy_pools(ctx).empty(); });
    return found;
}

GGML_BACKEND_API size_t ggml_backend_cuda_trim_pool(ggml_backend_t backend) {
    size_t released = 0;
    size_t failure = 0;
    for_each_rank(backend, [&](ggml_backend_cuda_context & ctx) {
        const size_t bytes = trim(ctx);
        if ((ptrdiff_t) bytes < 0) {
            failure = bytes;
        } else {
            released += bytes;
        }
    });
    return failure != 0 ? failure : released;
}

GGML_BACKEND_API void ggml_backend_cuda_pool_stats(ggml_backend_t backend, struct dflash_pool_stats * stats) {
    *stats = {};
    for_each_rank(backend, [&](ggml_backend_cuda_context & ctx) { add_stats(ctx, *stats); });
}

} // extern "C"
