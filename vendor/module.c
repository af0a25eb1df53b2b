/* Preamble of the generated cffi module: the real headers, then the functions that cdef/module.h declares. */

#include "ggml.h"
#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "ggml-rpc.h"
#include "gguf.h"
#include "ggml-impl.h"         /* struct ggml_cgraph */
#include "ggml-backend-impl.h" /* what a backend does to a graph before it is allocated */
#include "cdef/overlay.h"

typedef ggml_backend_reg_t (*ggml_backend_rpc_add_server_t)(const char *endpoint);
typedef void (*ggml_backend_rpc_start_server_t)(const char *endpoint, const char *cache_dir, size_t n_threads,
    size_t n_devices, ggml_backend_dev_t *devices);

#include <stdlib.h>
#include <string.h>
#ifdef __GLIBC__
#include <malloc.h>
#endif

static void dflash_log_none(enum ggml_log_level level, const char *text, void *user_data) {
    (void) level;
    (void) text;
    (void) user_data;
}

static bool dflash_flag_is_set(void *flag) {
    return __atomic_load_n((const int *) flag, __ATOMIC_RELAXED) != 0;
}

static struct ggml_backend_meta_split_state dflash_mirror(const struct ggml_tensor *tensor, void *user_data) {
    struct ggml_backend_meta_split_state state;
    (void) tensor;
    (void) user_data;
    memset(&state, 0, sizeof(state));
    state.axis = GGML_BACKEND_SPLIT_AXIS_MIRRORED;
    state.nr[0] = 1;
    state.n_segments = 1;
    return state;
}

static ggml_backend_dev_t dflash_mirrored_device(ggml_backend_dev_t *devs, size_t n_devs) {
    return ggml_backend_meta_device(devs, n_devs, dflash_mirror, NULL);
}

/* Memory of `tensor` is needed until the node `until` has been computed. */
struct dflash_dep {
    struct ggml_tensor *until;
    struct ggml_tensor *tensor;
};

struct dflash_deps {
    struct dflash_dep *items;
    size_t n, capacity;
    bool failed;
};

static void dflash_add_dep(void *user_data, struct ggml_tensor *tensor, struct ggml_tensor *until) {
    struct dflash_deps *deps = user_data;
    if (deps->n == deps->capacity) {
        const size_t capacity = deps->capacity ? 2 * deps->capacity : 256;
        struct dflash_dep *items = realloc(deps->items, capacity * sizeof(*items));
        if (items == NULL) {
            deps->failed = true;
            return;
        }
        deps->items = items;
        deps->capacity = capacity;
    }
    deps->items[deps->n++] = (struct dflash_dep) { until, tensor };
}

static int dflash_compare_deps(const void *left, const void *right) {
    const struct dflash_dep *a = left, *b = right;
    if (a->until != b->until) {
        return (uintptr_t) a->until < (uintptr_t) b->until ? -1 : 1;
    }
    return a->tensor == b->tensor ? 0 : (uintptr_t) a->tensor < (uintptr_t) b->tensor ? -1 : 1;
}

/* The first dependency that ends at `node`, in a list sorted by node; deps->n when there is none. */
static size_t dflash_find_dep(const struct dflash_deps *deps, const struct ggml_tensor *node) {
    size_t low = 0, high = deps->n;
    while (low < high) {
        const size_t middle = low + (high - low) / 2;
        if ((uintptr_t) deps->items[middle].until < (uintptr_t) node) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low < deps->n && deps->items[low].until == node ? low : deps->n;
}

static struct ggml_cgraph *dflash_copy_with_deps(
    struct ggml_cgraph *graph, const struct dflash_deps *deps, struct ggml_context **owner) {
    const int n_own = graph->size > graph->n_nodes ? graph->size : graph->n_nodes; /* a part has no size */
    const size_t size = (size_t) n_own + deps->n;
    struct ggml_init_params params = {
        /* .mem_size   = */ ggml_tensor_overhead() * (deps->n + 1) + ggml_graph_overhead_custom(size, false),
        /* .mem_buffer = */ NULL,
        /* .no_alloc   = */ true,
    };
    *owner = ggml_init(params);
    if (*owner == NULL) {
        return NULL;
    }
    struct ggml_cgraph *copy = ggml_new_graph_custom(*owner, size, false);
    for (int i = 0; i < graph->n_nodes; i++) {
        copy->nodes[copy->n_nodes++] = graph->nodes[i];
        for (size_t j = dflash_find_dep(deps, graph->nodes[i]); j < deps->n; j++) {
            if (deps->items[j].until != graph->nodes[i]) {
                break;
            }
            if (j > 0 && dflash_compare_deps(&deps->items[j - 1], &deps->items[j]) == 0) {
                continue;
            }
            struct ggml_tensor *marker = ggml_view_tensor(*owner, deps->items[j].tensor);
            marker->src[0] = deps->items[j].tensor;
            copy->nodes[copy->n_nodes++] = marker;
        }
    }
    for (int i = 0; i < graph->n_leafs; i++) {
        copy->leafs[copy->n_leafs++] = graph->leafs[i];
    }
    return copy;
}

static struct ggml_cgraph *dflash_prepare_graph(
    ggml_backend_t backend, struct ggml_cgraph *graph, struct ggml_context **owner) {
    struct dflash_deps deps = { NULL, 0, 0, false };
    struct ggml_backend_graph_optimize_params params = { dflash_add_dep, &deps };
    struct ggml_cgraph *prepared = graph;
    *owner = NULL;
    graph->uid = ggml_graph_next_uid();
    if (backend->iface.graph_optimize != NULL) {
        backend->iface.graph_optimize(backend, graph, &params);
    }
    if (deps.failed) {
        prepared = NULL;
    } else if (deps.n > 0) {
        qsort(deps.items, deps.n, sizeof(*deps.items), dflash_compare_deps);
        prepared = dflash_copy_with_deps(graph, &deps, owner);
    }
    free(deps.items);
    return prepared;
}

static struct ggml_cgraph *dflash_graph_part(struct ggml_cgraph *graph, int first, int last) {
    struct ggml_cgraph *part = malloc(sizeof(*part));
    if (part != NULL) {
        *part = ggml_graph_view(graph, first, last);
    }
    return part;
}

static int dflash_copy_leafs(const struct ggml_cgraph *from, struct ggml_cgraph *to) {
    for (int i = 0; i < from->n_leafs && to->n_leafs < to->size; i++) {
        to->leafs[to->n_leafs++] = from->leafs[i];
    }
    return to->n_leafs;
}

static void dflash_free_part(struct ggml_cgraph *part) {
    free(part);
}

static bool dflash_release_free_heap(void) {
#ifdef __GLIBC__
    return malloc_trim(0) != 0;
#else
    return false;
#endif
}
