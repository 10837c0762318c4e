module github.com/zebu-qcow2/zebu/bindings/go

go 1.23
