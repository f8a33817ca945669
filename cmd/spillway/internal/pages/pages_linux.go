package pages

import (
	"bytes"
	"os"
	"strconv"
	"syscall"
)

// window is the largest part of a file, in bytes, that one page fault makes resident: the default
// of Linux's fault_around_bytes.
const window = 64 << 10

// dontDump is MADV_DONTDUMP, which package syscall lacks.
const dontDump = 16

type mapping struct{ start, end uintptr }

var own = ownMappings()

// The package has few imports, so it is initialized before most others touch their pages. init
// divides the mappings: neighbors with different flags are different mappings. The flag that it
// sets on every other window leaves it out of core dumps, which never contain code anyway.
func init() {
	for _, m := range own {
		for at := m.start &^ (window - 1); at < m.end; at += 2 * window {
			if start, end := max(at, m.start), min(at+window, m.end); start < end {
				madvise(mapping{start, end}, dontDump)
			}
		}
	}
	Leave()
}

// Leave releases the program's resident pages. Those used again come back from the page cache.
func Leave() {
	for _, m := range own {
		madvise(m, syscall.MADV_DONTNEED)
	}
}

// madvise advises the kernel, which may refuse: then more pages are resident.
func madvise(m mapping, advice uintptr) {
	_, _, _ = syscall.Syscall(syscall.SYS_MADVISE, m.start, m.end-m.start, advice)
}

// ownMappings returns the mappings of this program's file without written pages.
func ownMappings() []mapping {
	path, err := os.Readlink("/proc/self/exe")
	if err != nil {
		return nil
	}
	smaps, err := os.ReadFile("/proc/self/smaps")
	if err != nil {
		return nil
	}
	return readOnly(smaps, path)
}

// readOnly returns the private mappings of path in the text of a smaps file that are not writable
// and have no written pages: the dynamic linker writes to some before it protects them.
func readOnly(smaps []byte, path string) (list []mapping) {
	ours := false
	for line := range bytes.Lines(smaps) {
		f := bytes.Fields(line)
		switch {
		case len(f) < 2:
		case !bytes.HasSuffix(f[0], []byte(":")): // a mapping begins
			perms := string(f[1])
			ours = (perms == "r-xp" || perms == "r--p") && bytes.HasSuffix(bytes.TrimSpace(line), []byte(" "+path))
			if ours {
				list = append(list, addresses(string(f[0])))
			}
		case ours && (string(f[0]) == "Anonymous:" || string(f[0]) == "Swap:") && string(f[1]) != "0":
			ours, list = false, list[:len(list)-1]
		}
	}
	return list
}

// addresses parses START-END of a smaps file; anything else is an empty mapping.
func addresses(text string) mapping {
	from, to, _ := bytes.Cut([]byte(text), []byte("-"))
	start, err := strconv.ParseUint(string(from), 16, 64)
	if err != nil {
		return mapping{}
	}
	end, err := strconv.ParseUint(string(to), 16, 64)
	if err != nil || end < start {
		return mapping{}
	}
	return mapping{uintptr(start), uintptr(end)}
}
