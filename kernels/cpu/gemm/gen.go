package gemm

//go:generate go run -C ../asmgen ./gemm -set f32avx512 -pkg gemm -out ../gemm/f32avx512_amd64.s
//go:generate go run -C ../asmgen ./gemm -set packavx2 -pkg gemm -out ../gemm/packavx2_amd64.s
//go:generate go run -C ../asmgen ./gemm -set f32avx2 -pkg gemm -out ../gemm/f32avx2_amd64.s
//go:generate go run -C ../asmgen ./gemm -set bf16avx512 -pkg gemm -out ../gemm/bf16avx512_amd64.s
//go:generate go run -C ../asmgen ./gemm -set int8avx512 -pkg gemm -out ../gemm/int8avx512_amd64.s
//go:generate go run -C ../asmgen ./gemm -set halfavx512 -pkg gemm -out ../gemm/halfavx512_amd64.s
//go:generate go run -C ../asmgen ./gemm -set halfavx2 -pkg gemm -out ../gemm/halfavx2_amd64.s
//go:generate go run -C ../asmgen ./gemm -set amx -pkg gemm -out ../gemm/amx_amd64.s
