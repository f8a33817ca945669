// What surrounds the products of cuBLASLt: see bind_linear.go.

// Column sums: a block takes 32 columns of a part of the rows, 8 rows at a time,
// and adds its 8 sums by a tree. Parts are added in order, by a second kernel.
#define COLUMNS 32
#define LANES 8

template <class T, class U> DEVICE void columns(const T *x, i64 rows, i64 cols, i64 part_rows, U *y, i64 y_stride, int accumulate) {
	SHARED(float, sums, LANES * COLUMNS);
	i64 col = (i64)blockIdx.x * COLUMNS + threadIdx.x, from = blockIdx.y * part_rows;
	i64 to = from + part_rows < rows ? from + part_rows : rows;
	float s = 0;
	if (col < cols)
		for (i64 r = from + threadIdx.y; r < to; r += LANES) s += load(x + r * cols + col);
	int at = threadIdx.y * COLUMNS + threadIdx.x;
	sums[at] = s;
	for (int half = LANES / 2; half > 0; half /= 2) {
		__syncthreads();
		if ((int)threadIdx.y < half) sums[at] += sums[at + half * COLUMNS];
	}
	if (threadIdx.y == 0 && col < cols) store(y + blockIdx.y * y_stride + col, sums[at], accumulate);
}

#define COLUMN_SUM(in, T, out, U) \
	KERNEL(COLUMNS * LANES, columns_##in##_##out, const int *skip, const T *x, i64 rows, i64 cols, i64 part_rows, U *y, i64 y_stride, int accumulate) { \
		SKIP(); \
		columns(x, rows, cols, part_rows, y, y_stride, accumulate); \
	}
COLUMN_SUM(f32, float, f32, float)
COLUMN_SUM(bf16, bf16, f32, float)
COLUMN_SUM(bf16, bf16, bf16, bf16)
COLUMN_SUM(f16, f16, f32, float)
COLUMN_SUM(f16, f16, f16, f16)

template <class T> DEVICE void column_parts(const float *part, i64 parts, i64 cols, T *y, int accumulate) {
	for (i64 c = first(); c < cols; c += stride()) {
		float s = 0;
		for (i64 p = 0; p < parts; p++) s += part[p * cols + c];
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
// does.
template <class T> DEVICE void add_bias(const T *bias, T *y, i64 rows, i64 cols) {
	i64 n = rows * cols;
	for (i64 i = first(); i < n; i += stride()) narrow(y + i, load(y + i) + load(bias + i % cols));
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
