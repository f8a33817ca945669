//go:build unix

package shim

import (
	"bytes"
	"debug/elf"
	"encoding/binary"
	"fmt"
	"strings"
)

// Entries of a kernel's .nv.info section. The layout is known from ELF files and NVIDIA's
// cuobjdump: a byte of format, a byte of attribute, and then either a value of 16 bits, or a size
// and that many bytes.
const (
	infoSized         = 4    // format: a size follows
	infoNone          = 1    // format: no value, two bytes of padding
	infoParameterSize = 0x19 // EIATTR_CBANK_PARAM_SIZE: total bytes of the parameters

	elfHeader = 64 // bytes
)

// CubinParameters returns for each kernel of a cubin the total size of its parameters in
// bytes, which a launch's packed arguments must match.
func CubinParameters(cubin []byte) (map[string]int, error) {
	if len(cubin) < elfHeader {
		return nil, fmt.Errorf("cubin: %d bytes are less than a header", len(cubin))
	}
	plain := bytes.Clone(cubin)
	plain[6] = byte(elf.EV_CURRENT) // debug/elf rejects NVIDIA's own ELF version numbers
	binary.LittleEndian.PutUint32(plain[20:], uint32(elf.EV_CURRENT))
	f, err := elf.NewFile(bytes.NewReader(plain))
	if err != nil {
		return nil, fmt.Errorf("cubin: %w", err)
	}
	sizes := map[string]int{}
	for _, s := range f.Sections {
		kernel, ok := strings.CutPrefix(s.Name, ".nv.info.")
		if !ok {
			continue
		}
		info, err := s.Data()
		if err != nil {
			return nil, fmt.Errorf("cubin: section %s: %w", s.Name, err)
		}
		sizes[kernel] = 0 // a kernel without parameters has no entry
		for len(info) >= 4 {
			value := int(binary.LittleEndian.Uint16(info[2:]))
			if info[0] != infoSized && info[0] != infoNone && info[1] == infoParameterSize {
				sizes[kernel] = value
			}
			n := 4
			if info[0] == infoSized {
				n += value
			}
			if n > len(info) {
				return nil, fmt.Errorf("cubin: section %s: an entry of %d bytes, %d are left", s.Name, n, len(info))
			}
			info = info[n:]
		}
	}
	if len(sizes) == 0 {
		return nil, fmt.Errorf("cubin: no section .nv.info.KERNEL")
	}
	return sizes, nil
}
