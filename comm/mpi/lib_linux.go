package mpi

import (
	"bytes"
	"errors"
	"fmt"
	"strings"
	"unsafe"

	"github.com/spillway-ml/spillway/internal/dl"
)

// Family is an ABI of MPI libraries; families differ in the representation of handles.
type Family int

// Families.
const (
	OpenMPI Family = iota // handles are addresses of symbols
	ABI                   // MPI 5's: handles are numbers as wide as a pointer
	MPICH                 // handles are 32-bit numbers; Intel MPI, MVAPICH, Cray MPICH
)

// family holds the file names of a family's libraries, and the constants of its ABI.
type family struct {
	name         string
	files        []string // tried in order
	symbols      bool     // handles are addresses of symbols
	world        uintptr
	byteType     uintptr
	errorsReturn uintptr
	null         uintptr // MPI_REQUEST_NULL
	ignore       uintptr // MPI_STATUSES_IGNORE
	inPlace      uintptr // MPI_IN_PLACE
	request      uintptr // bytes of a request handle; all handles have this size
	serialized   uintptr // MPI_THREAD_SERIALIZED
}

var families = map[Family]family{
	OpenMPI: {name: "Open MPI", files: []string{"libmpi.so.40", "libmpi.so.80", "libmpi.so.20"}, symbols: true, inPlace: 1, request: 8, serialized: 2},
	ABI: {name: "the MPI 5 ABI", files: []string{"libmpi_abi.so.0", "libmpi_abi.so"}, world: 0x101, byteType: 0x247, errorsReturn: 0x143,
		null: 0x180, inPlace: 1, request: 8, serialized: 2048},
	MPICH: {name: "MPICH", files: []string{"libmpich.so.12", "libmpi.so.12", "libmpi_cray.so.12"}, world: 0x44000000, byteType: 0x4c00010d,
		errorsReturn: 0x54000001, null: 0x2c000000, ignore: 1, inPlace: ^uintptr(0), request: 4, serialized: 2},
}

// lib is an opened library.
type lib struct {
	family
	shared bool // any thread may call MPI, one at a time
	path   string
	handle uintptr // handle of dlopen
	fn     struct {
		initThread, finalize, abort, size, rank, setErrhandler, isend, issend, irecv, testall, errorString, version uintptr
		split, iallgather, iallgatherv, ialltoall, ialltoallv, typeContiguous, typeResized, typeCommit, typeFree    uintptr
	}
}

// open opens the first library that it finds, trying the families in order. If the user
// names a file, open tries only that file and determines its family from its symbols.
func open(order []Family, named string) (*lib, error) {
	if err := dl.Err(); err != nil {
		return nil, fmt.Errorf("mpi: %w", err)
	}
	if named != "" {
		h, err := dl.Open(named, dl.Now|dl.Global)
		if err != nil {
			return nil, fmt.Errorf("mpi: %s=%.80q: %w", LibraryVar, named, err)
		}
		f := MPICH
		if _, err := dl.Symbol(h, "ompi_mpi_comm_world"); err == nil {
			f = OpenMPI
		} else if _, err := dl.Symbol(h, "MPI_Abi_get_version"); err == nil && strings.Contains(named, "abi") {
			f = ABI // MPICH's own library also has this function, but with MPICH's handles
		}
		return newLib(families[f], named, h)
	}
	var tried []string
	for _, f := range order {
		for _, file := range families[f].files {
			if h, err := dl.Open(file, dl.Now|dl.Global); err == nil {
				return newLib(families[f], file, h)
			}
			tried = append(tried, file)
		}
	}
	return nil, fmt.Errorf("mpi: none of %s can be opened; install the library that the launcher belongs to, or name its file in %s", strings.Join(tried, ", "), LibraryVar)
}

func newLib(f family, path string, handle uintptr) (*lib, error) {
	l := &lib{family: f, path: path}
	if err := l.bind(handle); err != nil {
		return nil, fmt.Errorf("mpi: %s is no library of %s: %w", path, f.name, err)
	}
	return l, nil
}

// LibraryVar is the environment variable that names the library's file.
const LibraryVar = "SPILLWAY_MPI"

func (l *lib) bind(handle uintptr) error {
	l.handle = handle
	symbols := map[string]*uintptr{
		"MPI_Init_thread": &l.fn.initThread, "MPI_Finalize": &l.fn.finalize, "MPI_Abort": &l.fn.abort, "MPI_Comm_size": &l.fn.size,
		"MPI_Comm_rank": &l.fn.rank, "MPI_Comm_set_errhandler": &l.fn.setErrhandler, "MPI_Isend": &l.fn.isend, "MPI_Issend": &l.fn.issend,
		"MPI_Irecv": &l.fn.irecv, "MPI_Testall": &l.fn.testall, "MPI_Error_string": &l.fn.errorString, "MPI_Get_library_version": &l.fn.version,
		"MPI_Comm_split": &l.fn.split, "MPI_Iallgather": &l.fn.iallgather, "MPI_Iallgatherv": &l.fn.iallgatherv, "MPI_Ialltoall": &l.fn.ialltoall,
		"MPI_Ialltoallv": &l.fn.ialltoallv, "MPI_Type_contiguous": &l.fn.typeContiguous, "MPI_Type_create_resized": &l.fn.typeResized,
		"MPI_Type_commit": &l.fn.typeCommit, "MPI_Type_free": &l.fn.typeFree,
	}
	if l.symbols {
		symbols["ompi_mpi_comm_world"], symbols["ompi_mpi_byte"] = &l.world, &l.byteType
		symbols["ompi_mpi_errors_return"], symbols["ompi_request_null"] = &l.errorsReturn, &l.null
	}
	for name, to := range symbols {
		var err error
		if *to, err = dl.Symbol(handle, name); err != nil {
			return err
		}
	}
	return nil
}

// callError is an error code that an MPI call returned.
type callError struct {
	call string
	code int32
	text string
}

func (e *callError) Error() string {
	return fmt.Sprintf("mpi: %s: %s (code %d)", e.call, e.text, e.code)
}

func (l *lib) check(call string, r uintptr) error {
	code := int32(r)
	if code == 0 {
		return nil
	}
	var text [8192]byte
	n := int32(0)
	dl.Call(l.fn.errorString, uintptr(uint32(code)), uintptr(unsafe.Pointer(&text)), uintptr(unsafe.Pointer(&n)))
	end := max(0, bytes.IndexByte(text[:], 0))
	return &callError{call, code, string(text[:end])}
}

func address(b []byte) uintptr { return uintptr(unsafe.Pointer(unsafe.SliceData(b))) }

// start initializes MPI and checks that MPI's rank and size are those of the launcher's
// environment.
func (l *lib) start(rank, world int) error {
	var provided, size, own int32
	if err := l.check("MPI_Init_thread", dl.Call(l.fn.initThread, 0, 0, l.serialized, uintptr(unsafe.Pointer(&provided)))); err != nil {
		return err
	}
	l.shared = uintptr(provided) >= l.serialized
	err := errors.Join(
		l.check("MPI_Comm_set_errhandler", dl.Call(l.fn.setErrhandler, l.world, l.errorsReturn)),
		l.check("MPI_Comm_size", dl.Call(l.fn.size, l.world, uintptr(unsafe.Pointer(&size)))),
		l.check("MPI_Comm_rank", dl.Call(l.fn.rank, l.world, uintptr(unsafe.Pointer(&own)))))
	if err != nil {
		return err
	}
	if int(size) != world || int(own) != rank {
		return &WorldError{fmt.Sprintf("mpi: %s (%s) says rank %d of %d, the launcher rank %d of %d: the library is not the launcher's; name its file in %s",
			l.path, l.about(), own, size, rank, world, LibraryVar)}
	}
	return nil
}

// WorldError says that MPI's rank or size differs from the launcher's environment, so the
// library does not belong to the launcher.
type WorldError struct{ text string }

func (e *WorldError) Error() string { return e.text }

// about returns the first line of the library's version text.
func (l *lib) about() string {
	var text [8192]byte
	n := int32(0)
	if l.check("MPI_Get_library_version", dl.Call(l.fn.version, uintptr(unsafe.Pointer(&text)), uintptr(unsafe.Pointer(&n)))) != nil {
		return l.name
	}
	line, _, _ := bytes.Cut(text[:min(max(int(n), 0), len(text))], []byte("\n"))
	return strings.TrimSpace(strings.TrimRight(string(line), "\x00"))
}
