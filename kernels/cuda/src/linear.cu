// What surrounds the products of cuBLASLt: see bind_linear.go.

// store_row writes or accumulates up to N elements of the n that a row has left: at once
// where they lie at a multiple of 16 bytes, or of their size.
template <int N, class U> DEVICE void store_row(U *y, const float *v, i64 n, int accumulate) {
	if (n < N || !(N == 4 ? quads(y) : wide(y))) {
		for (int j = 0; j < N && j < n; j++) store(y + j, v[j], accumulate);
		return;
	}
	float r[N];
	if (accumulate) get<N>(y, r);
	for (int j = 0; j < N; j++) r[j] = accumulate ? r[j] + v[j] : v[j];
	put<N>(y, r);
}

// Column sums: a block has WIDTH threads side by side, 16 bytes of a row each, and LANES
// rows at a time; its LANES sums of a column are added by a tree. A block has a part of
// the rows; parts are added in order, by a second kernel.
#define WIDTH 8
#define LANES 8

template <class T, class U> DEVICE void columns(const T *x, i64 rows, i64 cols, i64 part_rows, U *y, i64 y_stride, int accumulate) {
	const int N = Pack<T>::N, COLUMNS = WIDTH * N, READS = 4; // reads of a thread under way
	SHARED(float, sums, LANES * COLUMNS);
	const i64 col = (i64)blockIdx.x * COLUMNS + N * threadIdx.x, from = blockIdx.y * part_rows;
	const i64 to = from + part_rows < rows ? from + part_rows : rows;
	const bool packs = cols % N == 0 && wide(x);
	float s[N], v[N];
	for (int j = 0; j < N; j++) s[j] = 0;
	const T *p = x + (from + threadIdx.y) * cols + col;
	int left = col < cols && from + (int)threadIdx.y < to ? (int)((u32)(to - from - threadIdx.y + LANES - 1) / LANES) : 0;
	if (packs)
#pragma unroll 1
		for (; left >= READS; left -= READS, p += READS * LANES * cols) {
			float u[READS][N];
#pragma unroll
			for (int r = 0; r < READS; r++) get<N>(p + r * LANES * cols, u[r]);
#pragma unroll
			for (int r = 0; r < READS; r++)
#pragma unroll
				for (int j = 0; j < N; j++) s[j] += u[r][j];
		}
#pragma unroll 1
	for (; left > 0; left--, p += LANES * cols) {
		if (packs) get<N>(p, v);
		else
			for (int j = 0; j < N; j++) v[j] = col + j < cols ? load(p + j) : 0.0f;
		for (int j = 0; j < N; j++) s[j] += v[j];
	}
	const int at = threadIdx.y * COLUMNS + N * threadIdx.x;
	put_shared<N>(sums + at, s);
	for (int half = LANES / 2; half > 0; half /= 2) {
		__syncthreads();
		if ((int)threadIdx.y >= half) continue;
		for (int j = 0; j < N; j++) sums[at + j] += sums[at + j + half * COLUMNS];
	}
	if (threadIdx.y != 0 || col >= cols) return;
	const int M = Pack<U>::N < N ? Pack<U>::N : N; // 16 bytes of sums
#pragma unroll 1
	for (int k = 0; k < N; k += M) store_row<M>(y + blockIdx.y * y_stride + col + k, sums + at + k, cols - col - k, accumulate);
}

#define COLUMN_SUM(in, T, out, U) \
	KERNEL(WIDTH * LANES, columns_##in##_##out, const int *skip, const T *x, i64 rows, i64 cols, i64 part_rows, U *y, i64 y_stride, int accumulate) { \
		SKIP(); \
		columns(x, rows, cols, part_rows, y, y_stride, accumulate); \
	}
COLUMN_SUM(f32, float, f32, float)
COLUMN_SUM(bf16, bf16, f32, float)
COLUMN_SUM(bf16, bf16, bf16, bf16)
COLUMN_SUM(f16, f16, f32, float)
COLUMN_SUM(f16, f16, f16, f16)

// A thread adds the parts of four columns.
template <class T> DEVICE void column_parts(const float *part, i64 parts, i64 cols, T *y, int accumulate) {
	const bool packs = cols % 4 == 0 && wide(part);
	STRIDED(q, (cols + 3) / 4) {
		const i64 c = 4 * q;
		float s[4] = {0, 0, 0, 0}, v[4];
#pragma unroll 8
		for (int p = 0; p < (int)parts; p++) {
			const float *at = part + p * cols + c;
			if (packs) get<4>(at, v);
			else
				for (int j = 0; j < 4; j++) v[j] = c + j < cols ? at[j] : 0.0f;
			for (int j = 0; j < 4; j++) s[j] += v[j];
		}
		store_row<4>(y + c, s, cols - c, accumulate);
	}
}

KERNEL(256, column_parts_f32, const int *skip, const float *part, i64 parts, i64 cols, float *y, int accumulate) {
	SKIP();
	column_parts(part, parts, cols, y, accumulate);
}

KERNEL(256, column_parts_bf16, const int *skip, const float *part, i64 parts, i64 cols, bf16 *y, int accumulate) {
	SKIP();
	column_parts(part, parts, cols, y, accumulate);
}

KERNEL(256, column_parts_f16, const int *skip, const float *part, i64 parts, i64 cols, f16 *y, int accumulate) {
	SKIP();
	column_parts(part, parts, cols, y, accumulate);
}

// add_bias adds a bias to every row, where the library has no algorithm that
// does. Rows are the grid's second dimension.
template <class T> DEVICE void add_bias(const T *bias, T *y, i64 rows, i64 cols) {
	const int N = Pack<T>::N;
	const i64 packs = cols % N == 0 && wide(bias, y) ? cols / N : 0;
#pragma unroll 1
	for (i64 n = blockIdx.y; n < rows; n += gridDim.y) {
		T *row = y + n * cols;
		STRIDED(c, packs) {
			Pack<T> p = Pack<T>::at(row + c * N), q = Pack<T>::at(bias + c * N);
			for (int j = 0; j < N; j++) p.v[j] = p.v[j] + q.v[j];
			p.to(row + c * N);
		}
		if (!packs)
			STRIDED(c, cols) narrow(row + c, load(row + c) + load(bias + c));
	}
}

KERNEL(256, add_bias_f32, const int *skip, const float *bias, float *y, i64 rows, i64 cols) {
	SKIP();
	add_bias(bias, y, rows, cols);
}

KERNEL(256, add_bias_bf16, const int *skip, const bf16 *bias, bf16 *y, i64 rows, i64 cols) {
	SKIP();
	add_bias(bias, y, rows, cols);
}

KERNEL(256, add_bias_f16, const int *skip, const f16 *bias, f16 *y, i64 rows, i64 cols) {
	SKIP();
	add_bias(bias, y, rows, cols);
}
