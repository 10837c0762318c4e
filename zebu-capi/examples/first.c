/* Prints the first bytes of a disk: first IMAGE. */
#include <err.h>
#include <stdio.h>
#include <zebu.h>

int main(int argc, char **argv)
{
    zebu_error *error;
    char bytes[16];
    if (argc != 2)
        errx(2, "usage: first IMAGE");
    zebu_device *disk = zebu_open(argv[1], NULL, &error);
    if (!disk || zebu_read(disk, bytes, sizeof bytes, 0, &error) < 0)
        errx(1, "%s", zebu_error_get_message(error));
    for (size_t n = 0; n < sizeof bytes; n++)
        printf("%02x%c", (unsigned char)bytes[n], n + 1 < sizeof bytes ? ' ' : '\n');
    return zebu_close(disk, NULL) < 0;
}
