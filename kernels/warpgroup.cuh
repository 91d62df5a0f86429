// Instructions for tensor_product.cu, each as a function: products of Hopper's warpgroups (wgmma)
// with one matrix in registers, bulk copies and barriers for the other matrix in shared memory, and
// reads of the shared memory of other blocks of a cluster. Barriers exist from sm_80 on, wgmma only
// on sm_90a.
//
// Versions (times: tensor_product.cu): wgmma or mma.sync; registers given away or not.
#pragma once
#include "tensor_core.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define WARPGROUPS 1
#else
#define WARPGROUPS 0
#endif

#if WARPGROUPS

// The descriptor of a matrix of halves in shared memory. A row has 64 columns, 128 bytes. 8 rows
// are 1024 bytes and begin on a multiple of 1024. 16-byte word c of row n lies at c ^ (n % 8).
// `offset`, a constant, is added to `address`. Their sum may lie 32, 64 or 96 bytes after the first
// row's begin: the matrix then begins at column 16, 32 or 48.
DEVICE unsigned long long swizzled_matrix(u32 address, u32 offset) {
    const u32 low = (1u << 16 | address >> 4) + (offset >> 4);  // shared memory ends below 2^18
    return 1ull << 62 | 64ull << 32 | low;
}

// Stands between writes of registers and the products that use these registers.
DEVICE void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// Makes one group of all products since the last call.
DEVICE void products_group() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until all groups are done, except the newest N.
template <int N>
DEVICE void products_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

// Sets the registers of each thread of the calling warpgroup to N, a multiple of 8. `more` waits
// until other warpgroups of the block have given up enough registers.
template <int N>
DEVICE void registers_less() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N>
DEVICE void registers_more() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}

#define PRODUCT(N, SUMS, A, B, K)                                                               \
    "{\n.reg .pred p;\nsetp.ne.b32 p, " K ", 0;\n"                                               \
    "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.f16.f16 {" SUMS "}, {" A "}, " B         \
    ", p, 1, 1, 0;\n}"
#define SUM(n) "+f"(c[n][0]), "+f"(c[n][1]), "+f"(c[n][2]), "+f"(c[n][3])
#define SUMS4(n) SUM(n), SUM(n + 1), SUM(n + 2), SUM(n + 3)
#define INPUTS "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(u32(keep))

// c (64 x 8 G, float) += a (64 x 16) b (8 G x 16, transposed), both of halves; without `keep`
// c = a b. Warp w of the four has rows 16 w .. 16 w + 15 of a and c, in the layout of
// mma.m16n8k16 (tensor_core.cuh).
DEVICE void wgmma(float (&c)[1][4], u32 a0, u32 a1, u32 a2, u32 a3, unsigned long long b,
                     bool keep) {
    asm volatile(PRODUCT(8, "%0,%1,%2,%3", "%4,%5,%6,%7", "%8", "%9") : SUM(0) : INPUTS);
}
DEVICE void wgmma(float (&c)[2][4], u32 a0, u32 a1, u32 a2, u32 a3, unsigned long long b,
                     bool keep) {
    asm volatile(PRODUCT(16, "%0,%1,%2,%3,%4,%5,%6,%7", "%8,%9,%10,%11", "%12", "%13")
                 : SUM(0), SUM(1)
                 : INPUTS);
}
DEVICE void wgmma(float (&c)[4][4], u32 a0, u32 a1, u32 a2, u32 a3, unsigned long long b,
                     bool keep) {
    asm volatile(PRODUCT(32, "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15",
                         "%16,%17,%18,%19", "%20", "%21")
                 : SUMS4(0)
                 : INPUTS);
}
DEVICE void wgmma(float (&c)[8][4], u32 a0, u32 a1, u32 a2, u32 a3, unsigned long long b,
                     bool keep) {
    asm volatile(PRODUCT(64,
                         "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,"
                         "%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31",
                         "%32,%33,%34,%35", "%36", "%37")
                 : SUMS4(0), SUMS4(4)
                 : INPUTS);
}
DEVICE void wgmma(float (&c)[16][4], u32 a0, u32 a1, u32 a2, u32 a3, unsigned long long b,
                     bool keep) {
    asm volatile(PRODUCT(128,
                         "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,"
                         "%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,"
                         "%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,"
                         "%54,%55,%56,%57,%58,%59,%60,%61,%62,%63",
                         "%64,%65,%66,%67", "%68", "%69")
                 : SUMS4(0), SUMS4(4), SUMS4(8), SUMS4(12)
                 : INPUTS);
}

#endif  // WARPGROUPS

// Barriers that count arrivals and bytes. A phase ends when all arrivals and all bytes have come.
DEVICE void barrier_init(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// Makes the barriers that this thread initialised visible to bulk copies.
DEVICE void barriers_ready() {
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}
DEVICE void barrier_arrive(u32 barrier) {
    asm volatile("{\n.reg .b64 s;\nmbarrier.arrive.shared.b64 s, [%0];\n}" ::"r"(barrier)
                 : "memory");
}
// Arrives once all asynchronous copies that this thread has started are done.
DEVICE void barrier_arrive_after_copies(u32 barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}
#if __CUDA_ARCH__ >= 900
#define WAIT "try_wait"
#else
#define WAIT "test_wait"
#endif
DEVICE void barrier_wait(u32 barrier, u32 phase) {  // until the phase of this parity has ended
    asm volatile(
        "{\n.reg .pred p;\n"
        "wait:\nmbarrier." WAIT ".parity.shared.b64 p, [%0], %1;\n"
        "@!p bra wait;\n}" ::"r"(barrier),
        "r"(phase)
        : "memory");
}

#if __CUDA_ARCH__ >= 900

DEVICE void barrier_expect(u32 barrier, u32 bytes) {  // arrives, and announces bytes
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}
// Copies `bytes`, a multiple of 16, to shared memory and reports them to the barrier.
DEVICE void copy_bulk(u32 to, const void* from, u32 bytes, u32 barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
            "r"(to), "l"(from), "r"(bytes), "r"(barrier)
        : "memory");
}

// A barrier for all threads of the cluster. After it they can read all that was written before.
DEVICE void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::
                     : "memory");
}
// The float4 at `address` of the shared memory of block `rank` of the cluster.
DEVICE float4 take_from(u32 address, u32 rank) {
    float4 v;
    asm volatile(
        "{\n.reg .u32 a;\nmapa.shared::cluster.u32 a, %4, %5;\n"
        "ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [a];\n}"
        : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
        : "r"(address), "r"(rank)
        : "memory");
    return v;
}

#else
DEVICE void barrier_expect(u32, u32) {}
DEVICE void copy_bulk(u32, const void*, u32, u32) {}
#endif
