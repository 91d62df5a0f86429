// Reading rows of a table, and storing rows into the KV cache.
//
//   get_rows_<TYPE>       dst[t] = table[ids[t]] as floats, one thread per element. An id outside
//                         the table gives zeros and reads nothing
//   set_rows_<TYPE>       cache[indices[t]] = x[t]; a row with an index outside 0..n_kv-1 is not
//                         stored
//   copy_to_view_<TYPE>   dst[t] = x[t], into consecutive rows
//   copy_by_table_<TYPE>  cache[table[store] + t] = x[t]; a row outside 0..n_kv-1 is not stored
//   copy_cells            copies cells of a cache to other cells of the same cache
//
// Block: 256 threads. Grid: (rows, ceil(cols / 256)).
//
// One version of each, not tuned. A step has two get_rows; a fused step stores in product_qkv.cu or
// rope_store.cu.
#include "cells.cuh"
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

// A table of floats may be activations. These must not be read as constants, as `value` reads.
extern "C" __global__ void get_rows_F32(float* dst, const float* table, const int* ids, i64 n_ids,
                                        i64 cols, i64 table_rows) {
    pdl_trigger();
    pdl_wait();
    const i64 c = i64(blockIdx.y) * 256 + threadIdx.x, id = ids[blockIdx.x];
    if (c < cols)
        dst[blockIdx.x * cols + c] = id >= 0 && id < table_rows ? table[id * cols + c] : 0.f;
}

// Arguments: cache, pairs (to, from), n_pairs, row_bytes (a multiple of 2), n_cells. Grid:
// (n_pairs, ceil(row_bytes / 512)). No cell is both read and written.
extern "C" __global__ void copy_cells(u8* cache, const i64* pairs, i64 n_pairs, i64 row_bytes,
                                      i64 n_cells) {
    pdl_trigger();
    pdl_wait();
    const i64 to = pairs[2 * blockIdx.x], from = pairs[2 * blockIdx.x + 1];
    const i64 c = i64(blockIdx.y) * 256 + threadIdx.x;
    if (to < 0 || from < 0 || to >= n_cells || from >= n_cells || 2 * c >= row_bytes) return;
    reinterpret_cast<u16*>(cache + to * row_bytes)[c] =
        reinterpret_cast<const u16*>(cache + from * row_bytes)[c];
}

// set_rows: cache, x, indices, n_tokens, cols, n_kv. Two tokens with one index leave a row with
// elements of both.
// copy_to_view: dst, x, n_tokens, cols. The host patches dst in each step.
// copy_by_table: cache, x, table, store, n_tokens, cols, n_kv. The kernel reads the number of the
// first row from an input that the host writes in each step. With any number no sum overflows.
#define STORES(TYPE)                                                                             \
    extern "C" __global__ void set_rows_##TYPE(u8* cache, const float* x, const i64* indices,    \
                                               i64 n_tokens, i64 cols, i64 n_kv) {               \
        pdl_trigger();                                                                           \
        pdl_wait();                                                                              \
        const i64 c = i64(blockIdx.y) * 256 + threadIdx.x, row = indices[blockIdx.x];            \
        if (row < 0 || row >= n_kv) return;                                                      \
        Cell##TYPE::store(cache + row * Cell##TYPE::row_bytes(cols), c,                          \
                          c < cols ? x[blockIdx.x * cols + c] : 0.f, c < cols);                  \
    }                                                                                            \
    extern "C" __global__ void copy_to_view_##TYPE(u8* dst, const float* x, i64 n_tokens,        \
                                                   i64 cols) {                                   \
        pdl_trigger();                                                                           \
        pdl_wait();                                                                              \
        const i64 c = i64(blockIdx.y) * 256 + threadIdx.x;                                       \
        Cell##TYPE::store(dst + blockIdx.x * Cell##TYPE::row_bytes(cols), c,                     \
                          c < cols ? x[blockIdx.x * cols + c] : 0.f, c < cols);                  \
    }                                                                                            \
    extern "C" __global__ void copy_by_table_##TYPE(u8* cache, const float* x, const i64* table, \
                                                    i64 store, i64 n_tokens, i64 cols,           \
                                                    i64 n_kv) {                                  \
        pdl_trigger();                                                                           \
        pdl_wait();                                                                              \
        const i64 c = i64(blockIdx.y) * 256 + threadIdx.x, t = blockIdx.x;                       \
        const i64 first = table[store];                                                          \
        if (first < -t || first >= n_kv - t) return;                                             \
        Cell##TYPE::store(cache + (first + t) * Cell##TYPE::row_bytes(cols), c,                  \
                          c < cols ? x[t * cols + c] : 0.f, c < cols);                           \
    }
STORES(F16)
STORES(BF16)
STORES(F32)
STORES(Q8_0)
