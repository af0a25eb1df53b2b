/*
 * ggml-rpc.h: the protocol that clients and workers must share. Its functions are asked of the registry, so that
 * a build may leave the back end out.
 */

#define RPC_PROTO_MAJOR_VERSION ...
#define RPC_PROTO_MINOR_VERSION ...

typedef ggml_backend_reg_t (*ggml_backend_rpc_add_server_t)(const char *endpoint);
typedef void (*ggml_backend_rpc_start_server_t)(const char *endpoint, const char *cache_dir, size_t n_threads,
    size_t n_devices, ggml_backend_dev_t *devices);
