// Kernels of the shim's own tests.

KERNEL(1024, indices, int *y, int n) {
	int b = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
	int t = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
	y[b * 24 + t] = (blockIdx.x + 10 * blockIdx.y + 100 * blockIdx.z) * 1000 + threadIdx.x + 10 * threadIdx.y + 100 * threadIdx.z;
}

KERNEL(1024, reverse_static, int *y, int n) {
	SHARED(int, s, 1024);
	int *at = y + blockIdx.x * blockDim.x;
	s[threadIdx.x] = at[threadIdx.x];
	__syncthreads();
	at[threadIdx.x] = s[blockDim.x - 1 - threadIdx.x];
}

KERNEL(1024, reverse_dynamic, int *y, int n) {
	DYNAMIC_SHARED(int, s);
	int *at = y + blockIdx.x * blockDim.x;
	s[threadIdx.x] = at[threadIdx.x];
	__syncthreads();
	at[threadIdx.x] = s[blockDim.x - 1 - threadIdx.x];
}

KERNEL(1024, rotate, int *y, int n) {
	SHARED(int, s, 1024);
	s[threadIdx.x] = threadIdx.x;
	__syncthreads();
	for (int i = 0; i < 100; i++) {
		int v = s[(threadIdx.x + 1) % 1024];
		__syncthreads();
		s[threadIdx.x] = v;
		__syncthreads();
	}
	y[blockIdx.x * 1024 + threadIdx.x] = s[threadIdx.x];
}

KERNEL(32, unwritten, int *y, int n) {
	SHARED(int, s, 4);
	DYNAMIC_SHARED(int, d);
	if (threadIdx.x == 0) {
		y[2 * blockIdx.x] = s[3];
		y[2 * blockIdx.x + 1] = d[15];
		s[3] = d[15] = 5;
	}
}

KERNEL(64, warp, int *y, int n) {
	int i = threadIdx.x, lane = i % 32, *r = y + i * 8;
	const unsigned all = 0xffffffffu;
	int sum = i;
	for (int m = 16; m > 0; m /= 2) sum += __shfl_xor_sync(all, sum, m);
	r[0] = sum;
	r[1] = __shfl_sync(all, i, 5);
	r[2] = __shfl_down_sync(all, i, 3);
	r[3] = __shfl_up_sync(all, i, 4);
	r[4] = (int)__ballot_sync(all, lane % 2 == 0);
	r[5] = __shfl_sync(all, i, 3, 8);
	r[6] = __any_sync(all, lane == 31);
	r[7] = 0;
	if (lane >= 16) {
		int ones = 1;
		for (int m = 8; m > 0; m /= 2) ones += __shfl_xor_sync(0xffff0000u, ones, m);
		r[7] = ones;
	}
}

KERNEL(128, votes, int *y, int n) {
	atomicAdd(&y[0], (int)threadIdx.x);
	int any = __syncthreads_or(threadIdx.x == 77), all = __syncthreads_and(threadIdx.x != 77), count = __syncthreads_count(threadIdx.x % 3 == 0);
	atomicMax(&y[4], (int)threadIdx.x);
	if (threadIdx.x == 0) {
		atomicAdd(&y[1], any);
		atomicAdd(&y[2], all);
		atomicAdd(&y[3], count);
		atomicOr((unsigned *)&y[6], 1u << blockIdx.x);
	}
	if (threadIdx.x == 5) {
		int old = y[7];
		while (atomicCAS(&y[7], old, old + 1) != old) old = y[7];
	}
}

KERNEL(64, half_syncs, int *y, int n) {
	if (threadIdx.x < 32)
		__syncthreads();
	else if (threadIdx.x < 63)
		__syncwarp();
	else
		__syncwarp(0x80000001u);
	y[threadIdx.x] = 1;
}

KERNEL(64, ended_lane, int *y, int n) {
	if (threadIdx.x % 32 == 3) return;
	y[threadIdx.x] = __shfl_xor_sync(0xffffffffu, 1, 1);
}

KERNEL(64, foreign_lane, int *y, int n) {
	if (threadIdx.x < 8) y[threadIdx.x] = __shfl_sync(0xffu, 1, 9);
}

KERNEL(64, misaligned, int *y, int n) {
	ALIGNED((char *)y + 4 * threadIdx.x, 16);
	y[threadIdx.x] = 1;
}

KERNEL(96, early_return, int *y, int n) {
	SHARED(int, count, 1);
	if (threadIdx.x == 0) count[0] = 0;
	__syncthreads();
	if (threadIdx.x >= 64) return;
	atomicAdd(&count[0], 1);
	__syncthreads();
	y[threadIdx.x] = count[0];
}

struct Three { long long a, b, c; };

KERNEL(1, by_value, long long *y, int n, Three t, float f, double d) {
	y[0] = n;
	y[1] = 100 * t.a + 10 * t.b + t.c;
	y[2] = (long long)(f * 1000);
	y[3] = (long long)(d * 1000);
}
