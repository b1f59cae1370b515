// Kernels that only read: what a launch that moves the same bytes can reach, with loads into registers
// (`read_loads_*`) and with bulk copies into shared memory (`read_bulk`). The data must be aligned to 16 bytes.

typedef unsigned long long u64;

// Each thread keeps UNROLL 16-byte loads in flight. The sum is stored only if it hits one value, so that no load
// can be removed.
template <int UNROLL>
__device__ __forceinline__ void read_loads(const uint4* data, u64 vectors, unsigned* sink) {
    const u64 width = blockDim.x;
    unsigned sum = 0;
    for (u64 first = u64(blockIdx.x) * width * UNROLL + threadIdx.x; first < vectors;
         first += u64(gridDim.x) * width * UNROLL) {
        uint4 held[UNROLL];
#pragma unroll
        for (int i = 0; i < UNROLL; ++i) {
            const u64 at = first + i * width;
            held[i] = make_uint4(0, 0, 0, 0);
            if (at < vectors)
                asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];"
                             : "=r"(held[i].x), "=r"(held[i].y), "=r"(held[i].z), "=r"(held[i].w)
                             : "l"(data + at));
        }
#pragma unroll
        for (int i = 0; i < UNROLL; ++i) sum ^= held[i].x ^ held[i].y ^ held[i].z ^ held[i].w;
    }
    if (sum == 0x9E3779B9u) *sink = sum;
}

extern "C" __global__ void read_loads_4(const uint4* data, u64 vectors, unsigned* sink) {
    read_loads<4>(data, vectors, sink);
}

extern "C" __global__ void read_loads_8(const uint4* data, u64 vectors, unsigned* sink) {
    read_loads<8>(data, vectors, sink);
}

#if VT_ARCH >= 900
// One thread keeps a ring of `stages` bulk copies of `piece` bytes in flight; the last piece may be shorter.
// bytes and piece are multiples of 16; stages <= 16.
extern "C" __global__ void read_bulk(const char* data, u64 bytes, unsigned piece, int stages) {
    extern __shared__ __align__(128) char ring[];
    __shared__ __align__(8) u64 arrived[16];
    if (threadIdx.x != 0) return;
    const unsigned ring_at = unsigned(__cvta_generic_to_shared(ring));
    const unsigned arrived_at = unsigned(__cvta_generic_to_shared(arrived));
    for (int s = 0; s < stages; ++s)
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(arrived_at + 8 * s));
    asm volatile("fence.mbarrier_init.release.cluster;");
    asm volatile("fence.proxy.async.shared::cta;");

    const u64 stride = u64(gridDim.x) * piece;
    u64 asked = u64(blockIdx.x) * piece;
    int slot = 0;
    auto ask = [&]() {
        const unsigned size = bytes - asked < piece ? unsigned(bytes - asked) : piece;
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(arrived_at + 8 * slot), "r"(size));
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                         ring_at + slot * piece),
                     "l"(data + asked), "r"(size), "r"(arrived_at + 8 * slot)
                     : "memory");
        asked += stride;
    };
    for (; slot < stages && asked < bytes; ++slot) ask();
    slot = 0;
    unsigned phase = 0;
    for (u64 at = u64(blockIdx.x) * piece; at < bytes; at += stride) {
        unsigned done = 0;
        while (!done)
            asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                         : "=r"(done)
                         : "r"(arrived_at + 8 * slot), "r"(phase)
                         : "memory");
        if (asked < bytes) ask();
        if (++slot == stages) {
            slot = 0;
            phase ^= 1;
        }
    }
}
#endif
