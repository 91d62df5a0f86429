// Gathering rows of a table, and storing rows into the KV cache.
//
//   get_rows_<TYPE>   dst[t] = table[ids[t]] as floats, one thread per element. An id outside the
//                     table gives zeros and reads nothing
//   set_rows          cache[indices[t]] = x[t] as halves; an index outside 0..n_kv-1 is not stored
//   copy_to_view      dst[t] = x[t] as halves, rows one behind the other
//   copy_by_table     cache[table[store] + t] = x[t] as halves; a row outside 0..n_kv-1 is not stored
//
// Block: 256 threads. Grid: (rows, ceil(cols / 256)).
//
// One version of each, not tuned. A step has two get_rows; a fused step stores in product_qkv.cu or
// rope_store.cu.
#include "weights.cuh"

// Arguments: dst, table, ids, n_ids, cols, table_rows.
#define GET_ROWS(TYPE, BLOCK)                                                                    \
    extern "C" __global__ void get_rows_##TYPE(float* dst, const u8* table, const int* ids,     \
                                               i64 n_ids, i64 cols, i64 table_rows) {            \
        pdl_trigger();                                                                           \
        pdl_wait();                                                                              \
        const i64 c = i64(blockIdx.y) * 256 + threadIdx.x, id = ids[blockIdx.x];                 \
        if (c >= cols) return;                                                                   \
        const bool there = id >= 0 && id < table_rows;                                           \
        dst[blockIdx.x * cols + c] =                                                             \
            there ? TYPE::value(table, table_rows * cols / BLOCK, id * cols + c) : 0.f;          \
    }
GET_ROWS(F16, 1)
GET_ROWS(BF16, 1)
GET_ROWS(Q8_0, 32)
GET_ROWS(Q4_0, 32)
GET_ROWS(MXFP4, 32)
GET_ROWS(Q4_K, 256)
GET_ROWS(Q5_K, 256)
GET_ROWS(Q6_K, 256)

// A table of floats may be activations. They must not be read as constants, as `value` does.
extern "C" __global__ void get_rows_F32(float* dst, const float* table, const int* ids, i64 n_ids,
                                        i64 cols, i64 table_rows) {
    pdl_trigger();
    pdl_wait();
    const i64 c = i64(blockIdx.y) * 256 + threadIdx.x, id = ids[blockIdx.x];
    if (c < cols)
        dst[blockIdx.x * cols + c] = id >= 0 && id < table_rows ? table[id * cols + c] : 0.f;
}

// Arguments: cache, x, indices, n_tokens, cols, n_kv. Two tokens with one index leave a row with
// elements of both.
extern "C" __global__ void set_rows(u16* cache, const float* x, const i64* indices, i64 n_tokens,
                                    i64 cols, i64 n_kv) {
    pdl_trigger();
    pdl_wait();
    const i64 c = i64(blockIdx.y) * 256 + threadIdx.x, row = indices[blockIdx.x];
    if (c < cols && row >= 0 && row < n_kv)
        cache[row * cols + c] = float_to_half(x[blockIdx.x * cols + c]);
}

// Arguments: dst, x, n_tokens, cols. The host patches dst from step to step.
extern "C" __global__ void copy_to_view(u16* dst, const float* x, i64 n_tokens, i64 cols) {
    pdl_trigger();
    pdl_wait();
    const i64 c = i64(blockIdx.y) * 256 + threadIdx.x, at = blockIdx.x * cols + c;
    if (c < cols) dst[at] = float_to_half(x[at]);
}

// Arguments: cache, x, table, store, n_tokens, cols, n_kv. The first row's number is read here, from
// an input that the host writes from step to step. It may be any number: no sum overflows.
extern "C" __global__ void copy_by_table(u16* cache, const float* x, const i64* table, i64 store,
                                         i64 n_tokens, i64 cols, i64 n_kv) {
    pdl_trigger();
    pdl_wait();
    const i64 c = i64(blockIdx.y) * 256 + threadIdx.x, t = blockIdx.x;
    const i64 first = table[store];
    if (c < cols && first >= -t && first < n_kv - t)
        cache[(first + t) * cols + c] = float_to_half(x[t * cols + c]);
}
