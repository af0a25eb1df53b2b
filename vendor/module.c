/* Preamble of the generated cffi module: the real headers, then the functions that cdef/module.h declares. */

#include "ggml.h"
#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "gguf.h"
#include "cdef/overlay.h"

#include <string.h>

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
