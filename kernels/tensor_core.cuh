// Instructions of sm_80 and later, each as a function: products of halves on tensor cores, loads of
// their matrices from shared memory, and asynchronous copies to shared memory.
//
// One version. Measured as part of attention.cu and tensor_product.cu.
#pragma once
#include "common.cuh"

DEVICE u32 shared_address(const void* p) { return u32(__cvta_generic_to_shared(p)); }

// Starts a copy of 16 bytes to shared memory, past L1. Where `there` is false, the copy stores 16
// zeros and reads nothing; `from` may then be any address.
DEVICE void copy16(u32 to, const void* from, bool there) {  // `to` in shared memory
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
                 "r"(there ? 16 : 0)
                 : "memory");
}
DEVICE void copy16(void* to, const void* from, bool there) {
    copy16(shared_address(to), from, there);
}

// Makes one group of all copies started since the last call.
DEVICE void copies_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until all groups of this thread's copies have arrived, except the newest PENDING groups.
template <int PENDING>
DEVICE void copies_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Loads four 8 x 8 matrices of halves. Lane l gives the address of row l % 8 of matrix l / 8. Of
// each matrix a lane gets two elements of row lane / 4: columns 2 (lane % 4) and 2 (lane % 4) + 1.
DEVICE void load_matrices(u32 (&r)[4], u32 row) {  // an address in shared memory
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(row)
                 : "memory");
}
DEVICE void load_matrices(u32 (&r)[4], const void* row) { load_matrices(r, shared_address(row)); }

// As load_matrices, but transposes the matrices.
DEVICE void load_transposed(u32 (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row))
                 : "memory");
}

// Transposes an 8 x 8 matrix of halves in the registers of a warp.
DEVICE u32 transposed(u32 a) {
    u32 r;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(a));
    return r;
}

// c (16 x 8, float) += a (16 x 16) b (16 x 8), both of halves. With g = lane / 4 and t = lane % 4 a
// lane has
//
//   a[0]   row g      columns 2 t, 2 t + 1        b[0]   rows 2 t, 2 t + 1       column g
//   a[1]   row g + 8  columns 2 t, 2 t + 1        b[1]   rows 2 t + 8, 2 t + 9   column g
//   a[2]   row g      columns 2 t + 8, 2 t + 9    c[0], c[1]   row g      columns 2 t, 2 t + 1
//   a[3]   row g + 8  columns 2 t + 8, 2 t + 9    c[2], c[3]   row g + 8  columns 2 t, 2 t + 1
DEVICE void mma(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

DEVICE u32 pack_halves(float low, float high) {  // each to nearest, ties to even
    u32 r;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}
