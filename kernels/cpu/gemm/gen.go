package gemm

//go:generate go run -C ../asmgen ./gemm -set f32avx512 -pkg gemm -out ../gemm/f32avx512_amd64.s
//go:generate go run -C ../asmgen ./gemm -set f32avx2 -pkg gemm -out ../gemm/f32avx2_amd64.s
