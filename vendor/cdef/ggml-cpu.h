/*
 * ggml-cpu.h: the CPU backend, its threads, and what the compiler let it use.
 *
 * The ggml_cpu_has_* answers tell what the library was compiled for, not what this machine has.
 */

struct ggml_cplan {
    size_t work_size; /* bytes that the operations want beside the graph's own memory */
    ...;
};

struct ggml_cplan ggml_graph_plan(const struct ggml_cgraph *cgraph, int n_threads, struct ggml_threadpool *threadpool);
ggml_backend_t ggml_backend_cpu_init(void);
bool ggml_backend_is_cpu(ggml_backend_t backend);
void ggml_backend_cpu_set_n_threads(ggml_backend_t backend_cpu, int n_threads);
void ggml_backend_cpu_set_threadpool(ggml_backend_t backend_cpu, ggml_threadpool_t threadpool);
void ggml_backend_cpu_set_abort_callback(ggml_backend_t backend_cpu, ggml_abort_callback abort_callback, void
    *abort_callback_data);
void ggml_backend_cpu_set_use_ref(ggml_backend_t backend_cpu, bool use_ref);
ggml_backend_reg_t ggml_backend_cpu_reg(void);
struct ggml_threadpool *ggml_threadpool_new(struct ggml_threadpool_params *params);
void ggml_threadpool_free(struct ggml_threadpool *threadpool);
void ggml_threadpool_pause(struct ggml_threadpool *threadpool);
void ggml_threadpool_resume(struct ggml_threadpool *threadpool);
int ggml_cpu_has_sse3(void);
int ggml_cpu_has_ssse3(void);
int ggml_cpu_has_avx(void);
int ggml_cpu_has_avx_vnni(void);
int ggml_cpu_has_avx2(void);
int ggml_cpu_has_bmi2(void);
int ggml_cpu_has_f16c(void);
int ggml_cpu_has_fma(void);
int ggml_cpu_has_avx512(void);
int ggml_cpu_has_avx512_vbmi(void);
int ggml_cpu_has_avx512_vnni(void);
int ggml_cpu_has_avx512_bf16(void);
int ggml_cpu_has_amx_int8(void);
int ggml_cpu_has_neon(void);
int ggml_cpu_has_arm_fma(void);
int ggml_cpu_has_fp16_va(void);
int ggml_cpu_has_dotprod(void);
int ggml_cpu_has_matmul_int8(void);
int ggml_cpu_has_sve(void);
int ggml_cpu_has_sme(void);
int ggml_cpu_has_llamafile(void);
