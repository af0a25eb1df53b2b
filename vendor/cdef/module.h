/*
 * module.h: callbacks that cross from C to Python, and the few lines of C behind vendor/module.c.
 */

/* Defined from Python with @ffi.def_extern(). They may run on any thread; cffi takes the GIL. */
extern "Python" void dflash_log(enum ggml_log_level level, const char *text, void *user_data);
extern "Python" void dflash_abort(const char *message);
extern "Python" bool dflash_eval(struct ggml_tensor *t, bool ask, void *user_data);

/* A log callback that drops every line. */
void dflash_log_none(enum ggml_log_level level, const char *text, void *user_data);

/* An abort callback for the CPU backend: true once the int behind flag is not 0. Takes no GIL. */
bool dflash_flag_is_set(void *flag);

/* A meta device over devs that mirrors every tensor: the smallest one a test can make. */
ggml_backend_dev_t dflash_mirrored_device(ggml_backend_dev_t *devs, size_t n_devs);

/* From ggml-backend-impl.h: the backends behind a meta backend, which may be meta backends too. */
bool ggml_backend_is_meta(ggml_backend_t backend);
size_t ggml_backend_meta_n_backends(ggml_backend_t meta_backend);
ggml_backend_t ggml_backend_meta_simple_backend(ggml_backend_t meta_backend, size_t index);

/* Prepares a graph for `backend` before it gets memory, as ggml's scheduler does: the backend may reorder
   it and name tensors whose memory has to outlive a fused run of operations. The graph gets a number of its
   own, so that a captured one is recognised without comparing nodes. Returns the graph to allocate: the same,
   or a copy with markers that hold on to those tensors; *owner is then what to free after allocating. NULL:
   no memory. */
struct ggml_cgraph *dflash_prepare_graph(
    ggml_backend_t backend, struct ggml_cgraph *graph, struct ggml_context **owner);

/* The nodes [first, last) of a graph as one of its own, which shares them; dflash_free_part frees it. NULL: no
   memory. */
struct ggml_cgraph *dflash_graph_part(struct ggml_cgraph *graph, int first, int last);
void dflash_free_part(struct ggml_cgraph *part);

/* Lists what one graph only reads in another as well, since allocators count by these lists; how many there are. */
int dflash_copy_leafs(const struct ggml_cgraph *from, struct ggml_cgraph *to);

/* Gives whole free pages of the C library's heap back to the system; true if there were any. False where the
   library has no such call. */
bool dflash_release_free_heap(void);
