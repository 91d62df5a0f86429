// Instructions for clusters (sm_90 and later): blocks that run together and reach each other's
// shared memory. Each function is one instruction.
//
// One version. The gain of clusters: attention.cu (version 3), product_qkv.cu (heads normed).
#pragma once
#include "tensor_core.cuh"

DEVICE int cluster_rank() {
    u32 r;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
    return int(r);
}

// The address of `p` in the shared memory of block `rank` of the cluster.
DEVICE u32 address_in(const void* p, int rank) {
    u32 r;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(shared_address(p)), "r"(rank));
    return r;
}

DEVICE float4 load4_at(u32 address) {
    float4 v;
    asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "r"(address)
                 : "memory");
    return v;
}

DEVICE float2 load2_at(u32 address) {
    float2 v;
    asm volatile("ld.shared::cluster.v2.f32 {%0,%1}, [%2];"
                 : "=f"(v.x), "=f"(v.y)
                 : "r"(address)
                 : "memory");
    return v;
}

// All threads of the cluster call both. After the wait, every thread can read all that the threads
// wrote before they arrived.
DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }
DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }

DEVICE void store_at(u32 address, float v) {
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(address), "f"(v) : "memory");
}
