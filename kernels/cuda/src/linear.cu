// What surrounds the products of cuBLASLt: see bind_linear.go.

// Column sums: a block takes 32 columns of a part of the rows, 8 rows at a time, a
// thread four columns, and adds its 8 sums by a tree. Parts are added in order, by a
// second kernel.
#define COLUMNS 32
#define LANES 8

template <class T, class U> DEVICE void columns(const T *x, i64 rows, i64 cols, i64 part_rows, U *y, i64 y_stride, int accumulate) {
	SHARED(float, sums, LANES * COLUMNS);
	const i64 col = (i64)blockIdx.x * COLUMNS + 4 * threadIdx.x, from = blockIdx.y * part_rows;
	const i64 to = from + part_rows < rows ? from + part_rows : rows;
	const bool packs = cols % 4 == 0 && quads(x);
	float s[4] = {0, 0, 0, 0}, v[4];
	if (col < cols)
#pragma unroll 1
		for (i64 r = from + threadIdx.y; r < to; r += LANES) {
			const T *p = x + r * cols + col;
			if (packs) get<4>(p, v);
			else
				for (int j = 0; j < 4; j++) v[j] = col + j < cols ? load(p + j) : 0.0f;
			for (int j = 0; j < 4; j++) s[j] += v[j];
		}
	const int at = threadIdx.y * COLUMNS + 4 * threadIdx.x;
	put_shared<4>(sums + at, s);
	for (int half = LANES / 2; half > 0; half /= 2) {
		__syncthreads();
		if ((int)threadIdx.y >= half) continue;
		for (int j = 0; j < 4; j++) sums[at + j] += sums[at + j + half * COLUMNS];
	}
	if (threadIdx.y != 0) return;
	for (int j = 0; j < 4 && col + j < cols; j++) store(y + blockIdx.y * y_stride + col + j, sums[at + j], accumulate);
}

#define COLUMN_SUM(in, T, out, U) \
	KERNEL(COLUMNS / 4 * LANES, columns_##in##_##out, const int *skip, const T *x, i64 rows, i64 cols, i64 part_rows, U *y, i64 y_stride, int accumulate) { \
		SKIP(); \
		columns(x, rows, cols, part_rows, y, y_stride, accumulate); \
	}
COLUMN_SUM(f32, float, f32, float)
COLUMN_SUM(bf16, bf16, f32, float)
COLUMN_SUM(bf16, bf16, bf16, bf16)
COLUMN_SUM(f16, f16, f32, float)
COLUMN_SUM(f16, f16, f16, f16)

template <class T> DEVICE void column_parts(const float *part, i64 parts, i64 cols, T *y, int accumulate) {
	STRIDED(c, cols) {
		float s = 0;
#pragma unroll 4
		for (int p = 0; p < (int)parts; p++) s += part[p * cols + c];
		store(y + c, s, accumulate);
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
